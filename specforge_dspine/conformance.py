"""Does this installation compute DSpine? The functions that training and decoding call, against a vector file.

    python -m specforge_dspine.conformance FILE.safetensors [--dtype float64|float32|bfloat16]

A vector file (format: docs/vectors.md) holds a tiny draft, a target's tables, one sequence and, in float64,
everything that follows from them. Each quantity is printed with max|a − b| / max|b| (discrete ones: the share
that differs; bfloat16 gradients: 1 − cosine) and its tolerance; the exit status is 1 if any is off. The file's
blocks run in one padded batch beside a second, unsupervised sequence, and the objective runs one block per chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from specforge_dspine.config import DSpineSettings, small_draft_config
from specforge_dspine.curriculum import Blocks, alignment_beta, replacement_probability
from specforge_dspine.decoding import (
    candidates,
    greedy_walk,
    never_emitted,
    path_probabilities,
    transition_cache,
)
from specforge_dspine.model import DraftOutput, DSpineDraftModel
from specforge_dspine.objective import Rows, gathered, row_terms, supervised_rows
from specforge_dspine.training_model import DSpineTrainingModel
from specforge_dspine.transfer import build_transfer_space

# Qwen3's RoPE and norms compute in float32 whatever the model's dtype is, hence 1e-6 and not 1e-12 in float64.
# float32 gets a few times the 1e-5 that one run of it is off; bfloat16 keeps 8 bits, and discrete picks may flip.
TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-5, torch.bfloat16: 1.5e-1}
FLIPPED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 0.35}  # share of discrete values that may differ
# ℓ1's gradient is sign(q − p): where q ≈ p, eight bits flip it. In bfloat16 gradients are judged by 1 − cosine.
DIRECTION = 0.3
PATH_TEMPERATURE = 0.7
EXTRA_TOKENS, EXTRA_BLOCKS = 3, 1  # padding of the batch


class Check(NamedTuple):
    """One quantity: its relative error (for discrete ones: the share that differs) and what is allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


class Vectors:
    """A vector file and its JSON of scalars, the draft and the padded batch built from them."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.tensors = load_file(path)
        self.scalars = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        self.dtype = dtype
        self.length = len(self["inputs/input_ids"])
        self.anchors = self["inputs/anchors"]
        self.draft = self._draft()
        self.head = self["target/lm_head"].to(dtype)
        self.model = DSpineTrainingModel(
            self.draft,
            _linear(self.head),
            nn.Embedding.from_pretrained(self["target/embed_tokens"].to(dtype)),
            attention_backend="sdpa",
            num_anchors=len(self.anchors),
            loss_decay_gamma=self.scalars["config"]["gamma"],
            objective_chunk_blocks=1,
            normalization="separate",
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def _draft(self) -> DSpineDraftModel:
        c = self.scalars["config"]
        weights = {k.removeprefix("weights/"): v for k, v in self.tensors.items() if k.startswith("weights/")}
        rank, hidden = weights["injection.readouts.0.weight"].shape
        settings = DSpineSettings(
            transfer_rank=rank,
            message_size=len(weights["injection.bias"]),
            top_k=c["K"],
            ce_weight=c["ce_weight"],
            alignment_weight=c["alignment_weight"],
            replacement_layers=c["replacement_layers"],
            replacement_probability=c["replacement_probability"],
            replacement_hold_ratio=c["hold_ratio"],
            replacement_end_ratio=c["end_ratio"],
            candidate_mass_threshold=c["mass_threshold"],
            excluded_ids=tuple(self.scalars["excluded_ids"]),
        )
        taps = weights["fc.weight"].shape[1] // hidden
        draft = DSpineDraftModel(
            small_draft_config(
                vocab_size=len(self["target/lm_head"]),
                hidden_size=hidden,
                layers=c["layers"],
                heads=c["heads"],
                kv_heads=c["kv_heads"],
                head_dim=c["head_dim"],
                intermediate_size=len(weights["layers.0.mlp.gate_proj.weight"]),
                eps=c["eps"],
                theta=c["theta"],
                block_size=c["block"],
                target_layer_ids=range(taps),
                num_target_layers=taps + 1,
                mask_token_id=self.scalars["mask_token_id"],
                settings=settings,
            )
        ).to(self.dtype)
        wide = torch.promote_types(self.dtype, torch.float32)
        state = {name: value.to(self.dtype) for name, value in weights.items()}
        state |= {"transfer_codes": self["transfer/codes"].to(wide), "transfer_ready": torch.tensor(True)}
        draft.load_state_dict(state, strict=True)
        return draft

    def batch(self, name: str, *, fill: float = 0) -> Tensor:
        """``inputs/name`` [S, ..] as row 0 of [2, S + padding, ..]; row 1 is the same reversed."""
        value = self[f"inputs/{name}"]
        value = value.to(self.dtype) if value.is_floating_point() else value
        both = torch.stack([value, value.flip(0)])
        padding = both.new_full((2, EXTRA_TOKENS, *both.shape[2:]), fill)
        return torch.cat([both, padding], dim=1)

    def blocks(self, *, replace: bool) -> Blocks:
        """The file's blocks and a padding block in row 0; live but unsupervised blocks in row 1."""
        width = len(self.anchors) + EXTRA_BLOCKS
        anchors, keep = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.bool)
        anchors[:, : len(self.anchors)], keep[:, : len(self.anchors)] = self.anchors, True
        replaced = torch.zeros_like(keep)
        replaced[0, : len(self.anchors)] = self["inputs/replace"] & replace
        return Blocks(anchors, keep, replaced)

    def loss_mask(self) -> Tensor:
        """[2, S + padding]; the second sequence supervises nothing."""
        mask = self.batch("loss_mask")
        mask[1] = 0
        return mask


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def relative(ours: Tensor, theirs: Tensor) -> float:
    """max|a − b| / max|b|; discrete tensors: the share of entries that differ; wrong shape: infinite."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.is_floating_point():
        return float((ours.to(theirs.dtype) != theirs).double().mean())
    difference = (ours.detach().double() - theirs.double()).abs().max()
    return float(difference / theirs.double().abs().max().clamp_min(1e-12))


def direction(ours: Tensor, theirs: Tensor) -> float:
    """1 − cos of the angle between two gradients."""
    return 1 - float(F.cosine_similarity(ours.double().flatten(), theirs.double().flatten(), dim=0))


def candidate_margin(logits: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """How far two top-K sets [.., K] differ, as the largest relative logit gap between what each one holds alone."""
    spread = logits.abs().max()
    gap = logits.gather(-1, ours).amin(dim=-1) - logits.gather(-1, theirs).amin(dim=-1)
    return float(gap.abs().max() / spread)


def transfer_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    space = build_transfer_space(
        v.head, v.draft.settings.transfer_rank, dtype=torch.promote_types(v.dtype, torch.float32), chunk_rows=17
    )
    for field, value in space._asdict().items():
        yield f"transfer/{field}", value, v[f"transfer/{field}"]
    yield "transfer/codes_gram", space.codes @ space.codes.T, v["transfer/codes_gram"]


def schedule_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    s = v.scalars
    beta = alignment_beta(s["step"], s["warmup_steps"], v.draft.settings)
    chance = replacement_probability(s["step"], s["total_steps"], v.draft.settings)
    yield "schedule/beta", _scalar(beta), _scalar(s["beta"])
    yield "schedule/replacement_probability", _scalar(chance), _scalar(s["replacement_probability"])


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def forward(v: Vectors, *, replace: bool) -> DraftOutput:
    return v.model.draft_blocks(v.batch("input_ids"), v.batch("taps"), v.blocks(replace=replace), with_features=True)


def output_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    count = len(v.anchors)
    for replace, suffix in ((True, ""), (False, "_no_replacement")):
        out = forward(v, replace=replace)
        assert out.features is not None
        yield f"outputs/hidden{suffix}", out.hidden[0, :count], v[f"outputs/hidden{suffix}"]
        yield f"outputs/pre_injection{suffix}", out.pre_injection[0, :count], v[f"outputs/pre_injection{suffix}"]
        yield f"outputs/features{suffix}", out.features[:, 0, :count], v[f"outputs/features{suffix}"]


def rows_of(v: Vectors) -> Rows:
    return supervised_rows(
        v.batch("input_ids"),
        v.loss_mask(),
        v.blocks(replace=True),
        int(v.draft.block_size),
        v.model.loss_decay_gamma,
    )


def row_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Row terms with the file's candidates, and our own candidates by logit margin."""
    rows = rows_of(v)
    for name, ours in (("block", rows.block), ("t", rows.slot), ("label", rows.label), ("weight", rows.weight)):
        yield f"rows/{name}", ours, v[f"rows/{name}"]
    if len(rows.label) != len(v["rows/label"]):
        return  # the rows above are off; nothing below can be compared
    states = gathered(forward(v, replace=True), v.batch("last"), rows)
    terms = row_terms(v.draft, v.head, *states, rows.label, rows.predecessor, v["rows/candidates"])
    names = {"refined_ce": "rce", "refined_l1": "rl1"}
    for name, value in terms._asdict().items():
        yield f"rows/{names.get(name, name)}", value, v[f"rows/{names.get(name, name)}"]
    logits = F.linear(states[0], v.head).double()
    own = logits.topk(v.draft.settings.top_k, dim=-1).indices
    yield "rows/candidates", 1 + _scalar(candidate_margin(logits, own, v["rows/candidates"])), _scalar(1.0)


def decode_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Block 0: candidates by margin, then scores, picks and distributions in the file's order of candidates."""
    out = forward(v, replace=False)
    anchor = v["inputs/input_ids"][v.anchors[0]]
    excluded = never_emitted(v.draft.settings, v.draft.mask_token_id, len(v.head), v.head.device)
    hidden, pre = out.hidden[0, 0, 1:], out.pre_injection[0, 0, 1:]
    own, _ = candidates(v.head, hidden, excluded, v.draft.settings.top_k)
    theirs = v["decode/candidates"]
    logits = F.linear(hidden, v.head).double().masked_fill(excluded, -1e9)
    scale = logits[:, ~excluded]
    margin = (logits.gather(-1, own).amin(-1) - logits.gather(-1, theirs).amin(-1)).abs().max() / scale.abs().max()
    yield "decode/candidates", 1 + margin, _scalar(1.0)
    scores = transition_cache(v.draft, v.head, pre, theirs, anchor)
    yield "decode/scores", scores, v["decode/scores"]
    picks = theirs.gather(-1, greedy_walk(scores).unsqueeze(-1)).squeeze(-1)
    yield "decode/greedy", picks, v["decode/greedy"]
    name = f"decode/path_probs_t{PATH_TEMPERATURE}"
    yield name, path_probabilities(scores, v["decode/path"], PATH_TEMPERATURE), v[name]


def loss_checks(v: Vectors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The chunked objective and the gradient of numerator / denominator by every weight.

    In bfloat16 near ties change the top K, and with it the loss by a jump: there the file's candidates are used.
    """
    chosen = v["rows/candidates"] if v.dtype is torch.bfloat16 else None
    for normalization in ("separate", "shared"):
        v.model.normalization = normalization
        v.draft.zero_grad()
        loss = v.model(
            v.batch("input_ids"),
            v.loss_mask(),
            v.batch("taps"),
            v.batch("last"),
            v.blocks(replace=True),
            beta=v.scalars["beta"],
            candidates=chosen,
        )
        total = loss.numerator / loss.denominator
        total.backward()
        for name, value in (("loss", total), ("numerator", loss.numerator), ("denominator", loss.denominator)):
            yield f"{name}_{normalization}", value.double(), _scalar(v.scalars[f"{name}_{normalization}"])
        for name, parameter in v.draft.named_parameters():
            assert parameter.grad is not None, name
            yield f"grads_{normalization}/{name}", parameter.grad, v[f"grads_{normalization}/{name}"]


PARTS = (transfer_checks, schedule_checks, output_checks, row_checks, decode_checks, loss_checks)


def conformance(path: Path, dtype: torch.dtype) -> list[Check]:
    """Every check of the vector file at ``path`` in ``dtype``.

    Raises:
        FileNotFoundError: the file, or the JSON of scalars beside it, is missing.
        KeyError: the file lacks a quantity, with its name.
    """
    vectors = Vectors(path, dtype)
    results = []
    for part in PARTS:
        for name, ours, theirs in part(vectors):
            if dtype is torch.bfloat16 and name.startswith("grads_"):
                results.append(Check(name, direction(ours, theirs), DIRECTION))
                continue
            allowed = TOLERANCE if theirs.is_floating_point() else FLIPPED
            results.append(Check(name, relative(ours, theirs), allowed[dtype]))
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specforge_dspine.conformance", description=__doc__)
    parser.add_argument("file", type=Path, help="vector file (.safetensors, with a .json of scalars beside it)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    args: Any = parser.parse_args(argv)
    results = conformance(args.file, getattr(torch, args.dtype))
    for check in results:
        print(f"{'ok ' if check.ok else 'OFF'}  {check.error:9.2e} (allowed {check.tolerance:.0e})  {check.name}")
    off = [check.name for check in results if not check.ok]
    print(f"{args.file.name} in {args.dtype}: {len(results) - len(off)} of {len(results)} quantities agree")
    if off:
        print("off: " + ", ".join(off), file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
