"""The target's hidden states, captured inside an SGLang server. Imports no SpecForge."""
