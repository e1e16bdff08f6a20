"""Run lm-eval's tasks on a latq checkpoint through lm-eval's own `hf` model.

    python serving_examples/lm_eval_latq.py CKPT --tasks arc_easy hellaswag --limit 100

The `lm_eval` command cannot read the format, because transformers reads it only after `import vllm_latq`.
"""

import argparse
from collections.abc import Sequence

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

import vllm_latq  # noqa: F401 - makes transformers read latq checkpoints


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tasks and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CKPT", help="directory that `latq quantize` wrote")
    parser.add_argument("--tasks", nargs="+", default=["arc_easy"], help="names of lm-eval tasks (default arc_easy)")
    parser.add_argument("--include-path", help="folder with more task definitions")
    parser.add_argument("--limit", type=int, help="documents per task")
    parser.add_argument("--device", help="torch device (default: cuda if available, otherwise cpu)")
    options = parser.parse_args(arguments)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": options.checkpoint},
        tasks=options.tasks,
        num_fewshot=0,
        limit=options.limit,
        # lm-eval's own default is cuda, also where torch has none.
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        task_manager=TaskManager(include_path=options.include_path),
    )
    print(make_table(results))


if __name__ == "__main__":
    main()
