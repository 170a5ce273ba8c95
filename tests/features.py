"""Offline features of a tiny target, straight from transformers: what a capture would have written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specforge_dspine.stream.record import sample_name


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
