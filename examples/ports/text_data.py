"""Texts and their classes: the functions of five modules of Python's standard library, as bytes."""

import random
import re
import sysconfig
from pathlib import Path

from transformers import BatchEncoding, ByT5Tokenizer

MODULES = ("argparse", "ast", "inspect", "tarfile", "typing")
"""The classes: which module a function is from."""


def load_splits(tokenizer: ByT5Tokenizer, max_length: int) -> tuple[list[BatchEncoding], list[BatchEncoding]]:
    """Return the functions as tokens with their label, those for training and those for validation."""
    examples = []
    for label, module in enumerate(MODULES):
        text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")
        functions = re.findall(r"^ *def .*\n(?:(?: +.*)?\n)*?(?= *def |\S|\Z)", text, flags=re.MULTILINE)
        for function in functions:
            examples.append({**tokenizer(function, max_length=max_length, truncation=True), "label": label})
    random.Random(0).shuffle(examples)
    return examples[len(examples) // 5 :], examples[: len(examples) // 5]
