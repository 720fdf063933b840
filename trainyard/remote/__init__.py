"""Files from the Hugging Face Hub, object stores and the web, downloaded whole or not at all."""
