"""Measure a draft: it drafts and the target verifies, on evaluation sets, greedy and sampled.

    python -m specforge_dspine.evaluate --draft DIR --target DIR --sets humaneval mt-bench gsm8k=FILE --out DIR
        [--server URL] [--temperature 0 1] [--top-p P] [--top-k K] [--max-new-tokens N] [--limit N] [--seed N]

--draft: an export in either layout, or a third-party DFlash draft. The target verifies in this process, or through
--server, an SGLang server with our capture plugin. Greedy decoding of a captured=DIR set replays the target's
responses from there.

--out gets every response as it is finished (rounds.jsonl.partial, in the end rounds.jsonl), and result.json: τ with
its interval, acceptance by position, accepted lengths. The same command continues a run that was stopped, and leaves
a finished one as it is. Sets, replay and servers: docs/evaluation.md; fields: docs/metrics.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from specforge_dspine.evaluation.benchmarks import open_sets
from specforge_dspine.evaluation.loading import TargetVerifier, drafter_of, open_pair
from specforge_dspine.evaluation.options import EvaluateOptions
from specforge_dspine.evaluation.provenance import evaluation_facts
from specforge_dspine.evaluation.results import RESULT, ROUNDS, figures, table
from specforge_dspine.evaluation.runner import EvaluationRunner
from specforge_dspine.formats.writer import DTYPES
from specforge_dspine.streaming.feature_folder import check_features
from specforge_dspine.utils.chat_template import THINKING, check_template, end_ids
from specforge_dspine.utils.cli import Command, run_command
from specforge_dspine.utils.files import read_jsonl, write_json
from specforge_dspine.utils.ledger import Ledger


def evaluate(options: EvaluateOptions) -> str:
    """Decode all sets, write the result, return its table. Raises as ``open_pair`` and ``EvaluationRunner.run``."""
    sets = open_sets(options.sets, options.limit)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    draft, target = open_pair(options, tokenizer, DTYPES[options.dtype] if options.dtype else None)
    for each in sets:
        if each.captured:
            check_features(Path(each.source), target)
        else:
            check_template(tokenizer, THINKING[options.thinking])
    if options.verify_live and target.dtype != "float32":
        raise ValueError(
            f"--verify-live {options.verify_live}: it compares token by token, which needs float32, not "
            f"{target.dtype}; leave it out, or capture and evaluate in float32"
        )
    stop = end_ids(options.target, tokenizer)
    facts = evaluation_facts(options, draft, target, tokenizer, sets, stop)
    ledger = Ledger([options.out / ROUNDS], "evaluate", facts, overwrite=options.overwrite)
    if not ledger.is_finished():
        with ledger, TargetVerifier(target, options.device, options.server) as verifier:
            drafter = drafter_of(options.variant, draft, verifier)
            length = AutoConfig.from_pretrained(options.target).get_text_config().max_position_embeddings
            runner = EvaluationRunner(drafter, verifier, tokenizer, options, ledger, stop=stop, max_length=length)
            ledger.finish(runner.run(sets), {})
    result = facts | {"paths": {"draft": str(options.draft), "target": target.model_path}}
    result |= figures(read_jsonl(options.out / ROUNDS), options.temperature, int(draft.block_size) - 1)
    write_json(options.out / RESULT, result)
    if not any(entry["overall"]["rounds"] for entry in result["temperatures"].values()):
        raise ValueError(f"no response had a round; {options.out / RESULT} lists why under responses_skipped")
    return f"{table(result)}\nwrote {options.out / RESULT} and {options.out / ROUNDS}"


main = partial(run_command, Command(EvaluateOptions, evaluate), module="specforge_dspine.evaluate", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
