"""Named mistakes, each patched into the functions that training calls, and the checks that find each.

    python -m tests.support.mistakes [--only NAME ..]     prints the table of tests/curves/README.md

Two checks run under each mistake and are reported separately: conformance on the golden vectors (which quantities are
wrong) and the curve ``dspine`` (which part starts to deviate at which step). A mistake is a context manager. It
affects everything in this process, and nothing after its exit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.conformance.checks import conformance
from specforge_dspine.curves import toy_target
from specforge_dspine.curves.compare import Deviation, compare
from specforge_dspine.curves.runs import CURVES, load_reference, run_curve, toy_data_in
from specforge_dspine.modeling import attention_mask as masks
from specforge_dspine.modeling import settings as method_settings
from specforge_dspine.modeling import transfer_space as transfer
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.injection import AdjacentCausalInjection
from specforge_dspine.modeling.transfer_space import FLOOR, TransferSpace
from specforge_dspine.objective import alignment_gate, distillation, loss, refinement, supervision, training_model
from specforge_dspine.objective.distillation import Distill, DistillationTerms, Supervision
from specforge_dspine.objective.refinement import Candidates, RefinementTerms
from specforge_dspine.objective.supervision import MicroBatch, SupervisedPositions
from tests.support import ROOT

HERE = ROOT / "tests"
GOLDEN = (HERE / "golden" / "plain.safetensors", HERE / "golden" / "padded_vocab.safetensors")
REFERENCES = HERE / "curves"
CURVE = "dspine"
PUBLISHED_WARMUP = 146  # steps, of the paper's one run


@dataclass(frozen=True)
class Mistake:
    """``apply()`` makes it; ``in_capture``: it affects the captured states, so the toy data is captured again."""

    name: str
    apply: Callable[[], AbstractContextManager[None]]
    in_capture: bool = False


@dataclass(frozen=True)
class Caught:
    """What found a mistake: wrong quantities of conformance (file: quantity), and deviations of the curve."""

    conformance: list[str]
    curve: list[Deviation]


# How a function is replaced


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def everywhere(original: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """``make(original)`` in place of a function, under every name that our modules imported it by.

    Raises:
        LookupError: no module has it: the mistake would change nothing.
    """
    replacement = make(original)
    places = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("specforge_dspine")
        for name, value in list(vars(module).items())
        if value is original
    ]
    if len(places) < 2:
        raise LookupError(f"{original.__name__}: no module imports it; patch what training calls now")
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(attribute(module, name, replacement))
        yield


# Supervised positions: labels, teacher, weights


def positions_changed(
    change: Callable[[SupervisedPositions, Tensor], SupervisedPositions],
) -> AbstractContextManager[None]:
    """``change(positions, input_ids)`` after ``supervised_positions``."""

    def make(original: Callable[..., SupervisedPositions]) -> Callable[..., SupervisedPositions]:
        def changed(input_ids: Tensor, *rest: Any, **named: Any) -> SupervisedPositions:
            return change(original(input_ids, *rest, **named), input_ids)

        return changed

    return everywhere(supervision.supervised_positions, make)


def next_position(positions: SupervisedPositions, input_ids: Tensor, ahead: int) -> Tensor:
    return (positions.predecessor_position + ahead).clamp(max=input_ids.shape[1] - 1)


def labels_off_by_one() -> AbstractContextManager[None]:
    return positions_changed(
        lambda positions, ids: positions._replace(label=ids[positions.sequence, next_position(positions, ids, 2)])
    )


def teacher_one_position_late() -> AbstractContextManager[None]:
    return positions_changed(
        lambda positions, ids: positions._replace(predecessor_position=next_position(positions, ids, 1))
    )


def weights_changed(weight: Callable[[SupervisedPositions], Tensor]) -> AbstractContextManager[None]:
    return positions_changed(
        lambda positions, _ids: positions._replace(weight=torch.where(positions.weight > 0, weight(positions), 0.0))
    )


def position_decay_ignored() -> AbstractContextManager[None]:
    return weights_changed(lambda positions: torch.ones_like(positions.weight))


def slots_1_and_2_of_weight_1() -> AbstractContextManager[None]:
    """w = exp(−max(t − 2, 0)/γ); γ from slot 2's own weight exp(−1/γ), and no change where no row has slot 2."""

    def weight(positions: SupervisedPositions) -> Tensor:
        second = positions.weight[positions.slot == 2]
        step = second[0] if len(second) else torch.tensor(1.0)
        return torch.where(positions.slot >= 2, positions.weight / step, positions.weight)

    return weights_changed(weight)


# Settings and schedules


def alpha_swapped() -> AbstractContextManager[None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(config: Any) -> Any:
            settings = original(config)
            return settings.model_copy(update={"ce_weight": 1 - settings.ce_weight})

        return swapped

    return everywhere(method_settings.settings_of, make)


def warmup_fixed() -> AbstractContextManager[None]:
    """The published run's 146 steps whatever the run's own schedule is."""
    return everywhere(
        alignment_gate.alignment_beta,
        lambda original: lambda step, _warmup, settings: original(step, PUBLISHED_WARMUP, settings),
    )


# Capture


@torch.no_grad()
def unnormed(model: Any, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``captured_states`` with the final state from before the last norm."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        out = model.model(ids[None], output_hidden_states=True)
    finally:
        hook.remove()
    return torch.cat([out.hidden_states[tap + 1] for tap in taps], dim=-1), seen[0]


def teacher_before_final_norm() -> AbstractContextManager[None]:
    return attribute(toy_target, "captured_states", unnormed)


# Injection


def injection_forward(
    change: Callable[[AdjacentCausalInjection, Callable[..., Tensor], int, Tensor, Tensor, Tensor], Tensor],
) -> AbstractContextManager[None]:
    """``change(injection, original, layer, states, codes, known)`` in place of the injection's forward."""
    original = AdjacentCausalInjection.forward

    def forward(self: AdjacentCausalInjection, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        return change(self, original, layer, states, codes, known)

    return attribute(AdjacentCausalInjection, "forward", forward)


def messages_from_post_injection_features() -> AbstractContextManager[None]:
    """z_{t−1} = f(h_{t−1}), slot after slot, instead of f(u_{t−1})."""

    def change(
        injection: AdjacentCausalInjection, _original: Any, layer: int, states: Tensor, codes: Tensor, known: Tensor
    ) -> Tensor:
        receivers = injection.feature(layer, states)
        injected = [states[..., 0, :]]
        for t in range(1, states.shape[-2]):
            own = injection.feature(layer, injected[-1])
            predecessor = torch.where(known[..., t - 1, None], codes[..., t - 1, :], own)
            injected.append(injection.write(layer, states[..., t, :], receivers[..., t, :], predecessor))
        return torch.stack(injected, dim=-2)

    return injection_forward(change)


def slot_1_fed_by_its_state() -> AbstractContextManager[None]:
    """f(u_0) instead of the anchor's code."""

    def change(_self: Any, original: Any, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        features = _self.feature(layer, states[..., :1, :])
        return original(_self, layer, states, torch.cat([features, codes[..., 1:, :]], dim=-2), known)

    return injection_forward(change)


def replacement_per_layer() -> AbstractContextManager[None]:
    """Every second layer uses the draws of the neighboring block, which are equally likely and independent."""

    def change(_self: Any, original: Any, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        if layer % 2:
            known = known.roll(1, dims=1)
        return original(_self, layer, states, codes, known)

    return injection_forward(change)


def replacement_in_a_deep_layer() -> AbstractContextManager[None]:
    """What layer 1 may receive, every layer receives."""
    first: list[Tensor] = []

    def change(_self: Any, original: Any, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        if layer == 0:
            first[:] = [known]
        return original(_self, layer, states, codes, first[0])

    return injection_forward(change)


@contextlib.contextmanager
def alignment_of_pre_injection_features() -> Iterator[None]:
    """e_ℓ = f_ℓ(u_ℓ): where the model asks for the feature of what was just injected, it gets that of before."""
    forward, feature = AdjacentCausalInjection.forward, AdjacentCausalInjection.feature
    last: list[Tensor] = []  # injected, and before

    def remember(self: AdjacentCausalInjection, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        injected = forward(self, layer, states, codes, known)
        last[:] = [injected, states]
        return injected

    def earlier(self: AdjacentCausalInjection, layer: int, state: Tensor) -> Tensor:
        return feature(self, layer, last[1] if last and state is last[0] else state)

    with (
        attribute(AdjacentCausalInjection, "forward", remember),
        attribute(AdjacentCausalInjection, "feature", earlier),
    ):
        yield


def rms_scale_omitted() -> AbstractContextManager[None]:
    """h = u + W (g ⊙ m)."""
    original = AdjacentCausalInjection.write

    def write(self: AdjacentCausalInjection, layer: int, state: Tensor, *rest: Tensor) -> Tensor:
        rms = state.square().mean(dim=-1, keepdim=True).sqrt()
        return state + (original(self, layer, state, *rest) - state) / rms

    return attribute(AdjacentCausalInjection, "write", write)


@contextlib.contextmanager
def root_r_missing() -> Iterator[None]:
    """States and tokens enter the transfer space with unit norm."""
    feature, codes = AdjacentCausalInjection.feature, DSpineDraftModel.codes

    def unit_feature(self: AdjacentCausalInjection, layer: int, state: Tensor) -> Tensor:
        return feature(self, layer, state) / math.sqrt(self.rank)

    def unit_codes(self: DSpineDraftModel, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return codes(self, ids, dtype) / math.sqrt(self.settings.transfer_rank)

    with (
        attribute(AdjacentCausalInjection, "feature", unit_feature),
        attribute(DSpineDraftModel, "codes", unit_codes),
    ):
        yield


def refinement_detached() -> AbstractContextManager[None]:
    """The refinement does not train the backbone."""
    original = DSpineDraftModel.refine
    return attribute(DSpineDraftModel, "refine", lambda self, state, ids: original(self, state.detach(), ids))


# Objective


def refinement_changed(change: Callable[..., RefinementTerms]) -> AbstractContextManager[None]:
    """``change(refined, log_q, is_label)`` after ``refinement_terms``; log q̃ and is_label are [n, K]."""

    def make(original: Callable[..., RefinementTerms]) -> Callable[..., RefinementTerms]:
        def changed(
            draft: Any, head: Tensor, pre: Tensor, label: Tensor, predecessor: Tensor, c: Candidates
        ) -> RefinementTerms:
            scores = torch.einsum("nh,nkh->nk", draft.refine(pre, predecessor), head[c.ids])
            given = original(draft, head, pre, label, predecessor, c)
            return change(given, scores.log_softmax(dim=-1), c.ids == label.unsqueeze(-1))

        return changed

    return everywhere(refinement.refinement_terms, make)


def refined_ce_over_uncovered_rows() -> AbstractContextManager[None]:
    """The argmax of a row without its label is 0: the best candidate passes for the label."""

    def change(refined: RefinementTerms, log_q: Tensor, is_label: Tensor) -> RefinementTerms:
        index = is_label.int().argmax(dim=-1, keepdim=True)
        ce = -log_q.gather(-1, index).squeeze(-1)
        return refined._replace(ce=ce, covered=torch.ones_like(refined.covered))

    return refinement_changed(change)


def l1_without_the_mass_threshold() -> AbstractContextManager[None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda config: original(config).model_copy(update={"candidate_mass_threshold": -1.0})

    return everywhere(method_settings.settings_of, make)


def label_among_the_candidates() -> AbstractContextManager[None]:
    """Where the top K miss the label, it takes the last place."""

    def make(original: Distill) -> Distill:
        def changed(hidden: Tensor, head: Tensor, given: Supervision, settings: Any) -> DistillationTerms:
            label, ids = given.label, given.chosen
            if ids is None:
                ids = F.linear(hidden.detach(), head).topk(settings.top_k, dim=-1).indices
            missing = ~(ids == label.unsqueeze(-1)).any(dim=-1)
            ids = torch.cat([ids[:, :-1], torch.where(missing, label, ids[:, -1]).unsqueeze(-1)], dim=-1)
            return original(hidden, head, given._replace(chosen=ids), settings)

        return changed

    return everywhere(distillation.distill, make)


def combined_with(**changes: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """``normalize`` with some of its arguments replaced."""
    original = loss.normalize

    def normalize(
        sums: dict[str, Tensor], settings: Any, normalization: str, scope: str, beta: float, window_reduce: Any
    ) -> Any:
        given = {"normalization": normalization, "scope": scope, "beta": beta, "window_reduce": window_reduce}
        return original(sums, settings, **{k: changes[k](v) if k in changes else v for k, v in given.items()})

    return attribute(training_model, "normalize", normalize)


def refined_denominators_shared() -> AbstractContextManager[None]:
    return combined_with(normalization=lambda _given: "shared")


def gate_not_multiplied_by_ce() -> AbstractContextManager[None]:
    """λ = β."""
    return combined_with(window_reduce=lambda _given: lambda own: torch.cat([own[1:2], own[1:]]))


@contextlib.contextmanager
def gate_without_stop_gradient() -> Iterator[None]:
    """The CE in λ is trained through."""
    sums_of = distillation.backbone_sums

    def backbone_sums(batch: MicroBatch, *rest: Any, **named: Any) -> Any:
        sums, correct, candidates = sums_of(batch, *rest, **named)
        ce = F.cross_entropy(F.linear(batch.hidden, batch.head), batch.positions.label, reduction="none")
        return sums | {"ce": (batch.positions.weight.to(ce.dtype) * ce).sum()}, correct, candidates

    def window_contribution(sums: dict[str, Tensor]) -> Tensor:
        return torch.stack([sums[name] for name in ("ce", "weight", "covered", "heavy")])

    with (
        attribute(training_model, "backbone_sums", backbone_sums),
        attribute(loss, "window_contribution", window_contribution),
    ):
        yield


def alignment_averaged_over_layers() -> AbstractContextManager[None]:
    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mean(*arguments: Any) -> Tensor:
            layers = original(*arguments)
            return layers / layers.shape[-1]

        return mean

    return everywhere(alignment_gate.cosine_terms, make)


# Transfer space


def space_of(head: Tensor, rank: int, dtype: torch.dtype, *, centered: bool, whitened: bool) -> TransferSpace:
    """The transfer space in one go, with a step of it left out."""
    unit = F.normalize(head.detach().double(), dim=1, eps=FLOOR)
    mean = unit.mean(dim=0) if centered else torch.zeros_like(unit[0])
    values, vectors = torch.linalg.eigh((unit - mean).T @ (unit - mean))
    values, directions = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    directions = directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    projected = (unit - mean) @ (directions * values.rsqrt() if whitened else directions)
    codes = F.normalize(projected, dim=1, eps=FLOOR)
    return TransferSpace(*(value.to(dtype) for value in (codes, directions, values, mean)))


def other_space(**how: bool) -> AbstractContextManager[None]:
    def make(_original: Any) -> Any:
        def build(head: Tensor, rank: int, *, dtype: torch.dtype = torch.float32, **_: Any) -> TransferSpace:
            return space_of(head, rank, dtype, **how)

        return build

    return everywhere(transfer.build_transfer_space, make)


def codes_unwhitened() -> AbstractContextManager[None]:
    return other_space(centered=True, whitened=False)


def codes_not_centered() -> AbstractContextManager[None]:
    return other_space(centered=False, whitened=True)


# Attention


def mask_changed(change: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]) -> AbstractContextManager[None]:
    """``change(mask, anchors, keep, context, block)`` after ``block_mask``, mask [R, N, B, S + N·B]."""

    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(anchors: Tensor, keep: Tensor, context: int, block: int, *rest: Any, **named: Any) -> Tensor:
            mask = original(anchors, keep, context, block, *rest, **named)
            blocks = mask.reshape(*anchors.shape, block, -1).clone()
            return change(blocks, anchors, keep, context, block).reshape(mask.shape)

        return changed

    return everywhere(masks.block_mask, make)


def block_bidirectional() -> AbstractContextManager[None]:
    def change(mask: Tensor, anchors: Tensor, keep: Tensor, context: int, block: int) -> Tensor:
        for n in range(anchors.shape[1]):
            own = slice(context + n * block, context + (n + 1) * block)
            mask[:, n, :, own] = keep[:, n, None, None]
        return mask

    return mask_changed(change)


def context_includes_the_anchor() -> AbstractContextManager[None]:
    def change(mask: Tensor, anchors: Tensor, keep: Tensor, context: int, block: int) -> Tensor:
        at_anchor = torch.arange(context) == anchors[..., None, None]
        mask[..., :context] |= at_anchor & keep[..., None, None]
        return mask

    return mask_changed(change)


MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake("labels off by one", labels_off_by_one),
        Mistake("teacher one position late", teacher_one_position_late),
        Mistake("teacher before the final norm", teacher_before_final_norm, in_capture=True),
        Mistake("position decay ignored", position_decay_ignored),
        Mistake("slots 1 and 2 both of weight 1", slots_1_and_2_of_weight_1),
        Mistake("α swapped", alpha_swapped),
        Mistake("ℓ1 without the mass threshold", l1_without_the_mass_threshold),
        Mistake("refined CE over uncovered rows", refined_ce_over_uncovered_rows),
        Mistake("refined denominators shared", refined_denominators_shared),
        Mistake("label inserted into the candidates", label_among_the_candidates),
        Mistake("alignment averaged over layers", alignment_averaged_over_layers),
        Mistake("gate without stop-gradient", gate_without_stop_gradient),
        Mistake("gate not multiplied by CE", gate_not_multiplied_by_ce),
        Mistake("pre-injection features in the alignment", alignment_of_pre_injection_features),
        Mistake("warm-up fixed", warmup_fixed),
        Mistake("replacement drawn per layer", replacement_per_layer),
        Mistake("replacement in a deep layer", replacement_in_a_deep_layer),
        Mistake("slot 1 fed by f(u_0)", slot_1_fed_by_its_state),
        Mistake("messages from post-injection features", messages_from_post_injection_features),
        Mistake("√r missing", root_r_missing),
        Mistake("codes unwhitened", codes_unwhitened),
        Mistake("codes not centered", codes_not_centered),
        Mistake("block bidirectional", block_bidirectional),
        Mistake("context including the anchor", context_includes_the_anchor),
        Mistake("RMS scale omitted", rms_scale_omitted),
        Mistake("u detached in the refinement", refinement_detached),
    )
}
CONTROL = Mistake("none (control)", contextlib.nullcontext)


def caught_by(mistake: Mistake, workdir: Path) -> Caught:
    """Both checks under ``mistake``. The toy data below ``workdir`` is shared, except by mistakes in the capture."""
    with mistake.apply():
        off = [
            f"{path.stem}: {check.name}"
            for path in GOLDEN
            for check in conformance(path, torch.float64)
            if not check.ok
        ]
        if mistake.in_capture:
            with tempfile.TemporaryDirectory(dir=workdir) as folder:
                curve = run_curve(CURVES[CURVE], Path(folder))
        else:
            curve = run_curve(CURVES[CURVE], workdir, toy_data_in(workdir))
    return Caught(off, compare(load_reference(CURVE, REFERENCES), curve))


def table_row(mistake: Mistake, caught: Caught) -> str:
    """One line of the README's table."""
    quantities = list(dict.fromkeys(name.split(": ", 1)[1] for name in caught.conformance))
    first = f"{len(quantities)}: {', '.join(f'`{name}`' for name in quantities[:3])}" if quantities else "–"
    parts = list(dict.fromkeys(f"{d.part} ({d.step})" for d in caught.curve))
    sizes = max((d.size / d.allowed for d in caught.curve if d.allowed), default=0.0)
    curves = f"{len({d.part for d in caught.curve})}: {', '.join(parts[:4])}; {sizes:.0f} ×" if parts else "–"
    return f"| {mistake.name} | {first} | {curves} |"


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if neither check finds a mistake, or the control does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MISTAKES), metavar="NAME")
    args = parser.parse_args(argv)
    failed = []
    print(
        "| mistake | conformance: wrong quantities | curve `dspine`: deviating parts (from step); largest ÷ allowed |"
    )
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        toy_data_in(Path(folder))
        for mistake in [CONTROL, *(MISTAKES[name] for name in args.only or MISTAKES)]:
            caught = caught_by(mistake, Path(folder))
            print(table_row(mistake, caught), flush=True)
            if bool(caught.conformance or caught.curve) == (mistake is CONTROL):
                failed.append(mistake.name)
    if failed:
        print("wrong result: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
