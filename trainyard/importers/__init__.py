"""Configurations of other systems (NxD Training's YAML, launch scripts of Megatron-LM) converted to ours."""
