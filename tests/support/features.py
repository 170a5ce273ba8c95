"""A tiny target's own responses and offline features, straight from transformers: what regeneration and a capture
would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specforge_dspine.streaming.record import sample_name
from tests.support.small import write_samples

PROMPT = 8


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    """The target's plain greedy response."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}  # words may be id 0
    return model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()


def write_responses(target: Path, path: Path, count: int, *, tokens: int, seed: int = 0) -> Path:
    """Samples of the target's greedy responses, ``tokens`` long at most, to ``count`` prompts of ``PROMPT`` ids."""
    prompts = write_samples(path.with_suffix(".prompts.jsonl"), count, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with open(path, "w", encoding="utf-8") as stream:
        for line in prompts.read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)["input_ids"][:PROMPT]
            response = generate(model, prompt, tokens)
            mask = [0] * PROMPT + [1] * len(response)
            stream.write(json.dumps({"input_ids": prompt + response, "loss_mask": mask}) + "\n")
    return path


def write_features(target: Path, samples: Path, out: Path, layers: list[int]) -> Path:
    """One ``.ckpt`` per line of ``samples``: taps [1, S, T·H] and the final post-norm state [1, S, H]."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    out.mkdir(parents=True)
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        ids = torch.tensor(sample["input_ids"])
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        record = {
            "input_ids": ids,
            "loss_mask": torch.tensor(sample["loss_mask"]),
            "hidden_states": torch.cat([states[layer + 1] for layer in layers], dim=-1),
            "target_last_hidden_states": states[-1],
        }
        torch.save(record, out / f"{sample_name(sample['input_ids'], sample['loss_mask'])}.ckpt")
    return out
