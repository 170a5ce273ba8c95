"""The main job on a small model: prompts, responses, training, export, evaluation."""
