"""Hidden states of the target, captured inside an SGLang server. Imports no SpecForge."""
