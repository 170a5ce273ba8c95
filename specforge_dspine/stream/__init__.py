"""How the target's hidden states reach the trainer: SGLang plugin, server, client, source."""
