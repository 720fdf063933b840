"""How update rules change the flat state of a rank; `UpdateRule.implementation` names the class of each."""
