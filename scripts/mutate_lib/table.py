"""Prints a language's modules of modules.yaml, each with its tests, one line a module.

python scripts/mutate_lib/table.py python|rust [MODULE]
"""

import sys
from pathlib import Path

import yaml


def main() -> None:
    language, wanted = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    table = yaml.safe_load(Path(__file__).with_name("modules.yaml").read_text())
    for module, tests in table[language].items():
        if wanted in ("", module):
            print(module, *tests)


if __name__ == "__main__":
    main()
