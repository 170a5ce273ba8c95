"""A toy target whose text is a Markov chain by construction, so that a draft learns it within sixty steps.

The W words sit on a ring; the best successor of word i is i + k₁, the second best i + k₂. A word's embedding encodes
its place on the ring by several frequencies, so that "the next word" is a linear map of a code, which a message of
few numbers can carry. The LM head is computed, not trained:

    embed(i) = M · [a_f cos(2π f i / W), a_f sin(2π f i / W)]_f + noise
    E_v = s · (embed(v − k₁) + c · embed(v − k₂)) / w,     w: the final norm's weights

With n = h / RMS(h), the logit of v after x is E_v · (w ⊙ n) = s · (embed(v − k₁) + c · embed(v − k₂)) · n, largest at
x + k₁, then at x + k₂. The division removes the norm's weights, so a state from before the norm is useless. The
layers between are small and random, so that the teacher depends on more than the last word. Text is drawn from the
same chain: the adjacent predecessor decides the next word, which is what injection and refinement are for. Everything
follows from one seed; no random number comes from a library's own initialization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as WordTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from specforge_dspine.streaming.record import sample_name

VOCAB, HIDDEN, LAYERS = 112, 48, 4
SPECIAL, ENTRIES = 3, 104  # of the tokenizer: ids below 3 are special, id 104 is the mask, the rest padding
WORDS = ENTRIES - SPECIAL
STEPS = (17, 40)  # k₁, k₂ on the ring
CHANCES = (0.65, 0.25)  # of k₁ and k₂ in the text; else any word
SECOND_BEST = 0.8  # c: makes the teacher's gap between the two as wide as the text's
SHARPNESS = 8.0  # logit of the best successor of an undisturbed state
FREQUENCIES = 8
DRAFT_INIT = 0.1
DISTURBANCE = 0.08  # standard deviation of the layers' weights

TAPS = (0, 1, 2)
SAMPLES = 48
LONGEST, SHORTEST = 30, 9  # tokens of a sample
SEED = 20260

TARGET, FEATURES = "target", "features"


def build_toy_data(folder: Path, seed: int = SEED) -> None:
    """Write the target, its tokenizer and the features of its text below ``folder``."""
    model, successors = build_target(seed)
    model.save_pretrained(folder / TARGET)
    save_tokenizer(folder / TARGET)
    write_features(model, folder / FEATURES, draw_text(successors, seed))


def build_target(seed: int) -> tuple[Qwen3ForCausalLM, Tensor]:
    """The target in float32, and [2, V] the best and the second-best successor of every word id."""
    generator = torch.Generator().manual_seed(seed)
    ids = SPECIAL + torch.randperm(WORDS, generator=generator)  # ids[i]: the word at place i of the ring
    embedding = ring_embedding(ids, generator)
    successors = torch.zeros(2, VOCAB, dtype=torch.long)
    for row, step in enumerate(STEPS):
        successors[row, ids] = ids.roll(-step)

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
            initializer_range=DRAFT_INIT,
        )
    ).eval()
    with torch.no_grad():
        for _name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DISTURBANCE)
            if parameter.dim() == 1:  # every norm
                parameter.add_(1.0)
        norm = model.model.norm.weight
        norm.copy_(0.25 + 2.0 * torch.rand(HIDDEN, generator=generator))
        model.model.embed_tokens.weight.copy_(embedding)
        head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3  # special and padded rows: never a likely word
        head[successors[0, ids]] = embedding[ids]
        head[successors[1, ids]] += SECOND_BEST * embedding[ids]
        model.lm_head.weight.copy_(SHARPNESS / HIDDEN * head / norm)
    return model, successors


def ring_embedding(ids: Tensor, generator: torch.Generator) -> Tensor:
    """Embeddings [V, H] with entries of size 1.

    Amplitudes fall with f and M mixes them, so that no two directions of the head are equally strong. The transfer
    space then has no ties, and rounding does not change its order.
    """
    place = torch.arange(WORDS, dtype=torch.float64)
    frequency = 1 + torch.randperm(WORDS // 2, generator=generator)[:FREQUENCIES].double()
    amplitude = 1 / torch.arange(2, FREQUENCIES + 2, dtype=torch.float64).sqrt()
    angle = 2 * math.pi * place.unsqueeze(1) * frequency / WORDS
    waves = torch.cat([amplitude * angle.cos(), amplitude * angle.sin()], dim=1)
    mixed = waves @ torch.randn(2 * FREQUENCIES, HIDDEN, generator=generator, dtype=torch.float64)
    table = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    table[ids] = mixed / mixed.square().mean(dim=1, keepdim=True).sqrt() + 0.2 * table[ids]
    return table.float()


def draw_text(successors: Tensor, seed: int, count: int = SAMPLES) -> list[dict[str, list[int]]]:
    """``count`` samples of ``input_ids`` and ``loss_mask``: an unsupervised prompt, then text of the chain.

    Lengths vary; every eighth sample is short, every fifth has a hole in its mask.
    """
    generator = torch.Generator().manual_seed(seed + 1)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for index in range(count):
        prompt = integer(2, 6)
        length = integer(SHORTEST, SHORTEST + 3) if index % 8 == 7 else integer(2 * LONGEST // 3, LONGEST + 1)
        ids = [integer(SPECIAL, ENTRIES)]
        while len(ids) < length:
            choice = float(torch.rand((), generator=generator))
            if choice < CHANCES[0]:
                ids.append(int(successors[0, ids[-1]]))
            elif choice < sum(CHANCES):
                ids.append(int(successors[1, ids[-1]]))
            else:
                ids.append(integer(SPECIAL, ENTRIES))
        mask = [0] * prompt + [1] * (length - prompt)
        if index % 5 == 4:
            hole = integer(prompt + 2, length - 2)
            mask[hole : hole + 2] = [0, 0]
        samples.append({"input_ids": ids, "loss_mask": mask})
    return samples


@torch.no_grad()
def captured_states(model: Qwen3ForCausalLM, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Captured states of ``ids`` [S]: outputs of the tapped layers (layer k: ``hidden_states[k + 1]``) [1, S, T·H],
    and the final state after the last norm [1, S, H]."""
    out = model.model(ids[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[tap + 1] for tap in taps], dim=-1), out.last_hidden_state


def write_features(model: Qwen3ForCausalLM, folder: Path, samples: Sequence[dict[str, list[int]]]) -> None:
    """One offline feature file per sample, as the trainer reads them."""
    folder.mkdir(parents=True)
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        taps, last = captured_states(model, ids, TAPS)
        record = {
            "input_ids": ids,
            "loss_mask": torch.tensor(sample["loss_mask"]),
            "hidden_states": taps,
            "target_last_hidden_states": last,
        }
        torch.save(record, folder / f"{sample_name(sample['input_ids'], sample['loss_mask'])}.ckpt")


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer with fewer entries than the head has rows; the first id after them is the mask."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(SPECIAL, ENTRIES)}
    tokenizer = WordTokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
