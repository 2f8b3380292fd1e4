"""A new user's path, from the README alone: its run file on a file of their own, and the model opened by plain transformers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from coordinator.preparation import prepare_run
from pipecomp.config import load_run_config
from pipecomp.data.loading import load_dataset
from pipecomp.data.records import DataSettings
from pipecomp.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = ROOT / "examples" / "demo-gpt2"
PIPECOMP = str(Path(sys.executable).with_name("pipecomp"))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: the README's run file, records like its own, and a small pretrained model in place of the hub's."""
    shape = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 256, "vocab_size": 1024}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, tmp_path / "tiny" / name)
    own = section("Fine-tune on your own text")
    (tmp_path / "run.toml").write_text(code_blocks("toml", own)[0], encoding="utf-8")
    record = json.loads(code_blocks("jsonl", own)[0].splitlines()[0])
    for name, first, last in (("my.jsonl", 0, 24), ("held-out.jsonl", 24, 31)):
        completions = [f"{record['completion']} Number {i}, {'again ' * (i % 5)}." for i in range(first, last)]
        records = [{**record, "completion": completion} for completion in completions]
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return tmp_path


def test_the_readmes_run_gives_a_model_that_plain_transformers_opens_with_the_same_loss(folder: Path) -> None:
    [launch] = [line for line in README.splitlines() if line.startswith("pipecomp launch ")]
    tiny = {"model.name": "tiny", "data.eval": "held-out.jsonl", "data.max_length": 100, "train.learning_rate": 1e-2}
    exact = {"compression.evaluation": '{codec = "identity"}'}
    overrides = [word for key, value in {**tiny, **exact}.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [PIPECOMP, *launch.split()[1:], *overrides], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 9  # three epochs of 24 samples, 8 a step
    assert summary["eval_loss"] < summary["initial_eval_loss"] - 0.1
    model, tokenizer = opened(folder)
    assert plain_loss(model, tokenizer, folder / "held-out.jsonl") == pytest.approx(summary["eval_loss"], abs=1e-5)
    before = AutoModelForCausalLM.from_pretrained(folder / "tiny").eval()
    assert plain_loss(before, tokenizer, folder / "held-out.jsonl") == pytest.approx(summary["initial_eval_loss"], abs=1e-5)


def test_the_readmes_own_records_leave_some_to_train_on_and_one_to_hold_out(folder: Path) -> None:
    records = code_blocks("jsonl", section("Fine-tune on your own text"))[0]
    (folder / "my.jsonl").write_text(records, encoding="utf-8")
    run = prepare_run(load_run_config(folder / "run.toml", [f"model.name={folder}/tiny"]), None)
    assert (run.num_samples, run.num_held_out) == (records.count("\n") - 1, 1)
    assert run.num_samples > 1


def opened(folder: Path) -> tuple[Any, Any]:
    """What the README's own lines give, run in the user's folder."""
    lines = code_blocks("python", section("Fine-tune on your own text"))[0].replace('"outputs/', f'"{folder}/outputs/')
    names: dict[str, Any] = {}
    exec(lines, names)
    return names["model"].eval(), names["tokenizer"]


def plain_loss(model: Any, tokenizer: Any, path: Path) -> float:
    """Mean loss over the completions' tokens, by transformers alone, a sample at a time."""
    total, count = 0.0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt = tokenizer(record["prompt"])["input_ids"]
        completion = [*tokenizer(record["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + completion
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + completion]), labels=torch.tensor([labels])).loss
        total, count = total + float(loss) * len(completion), count + len(completion)
    return total / count


@pytest.mark.parametrize("index", range(4))
def test_every_record_that_the_readme_shows_is_trained_where_it_says(index: int, tmp_path: Path) -> None:
    example = code_blocks("jsonl")[index]
    (tmp_path / "my.jsonl").write_text(example, encoding="utf-8")
    tokenizer = load_tokenizer(str(DEMO))
    tokenizer.chat_template = TEMPLATE
    sample = load_dataset(tmp_path / "my.jsonl", tokenizer, DataSettings(), cache_folder=None)[0]
    trained = tokenizer.decode([int(token) for token in sample.labels if token != -100], skip_special_tokens=True)
    expected = ("Paris.", "Every token of this is trained.", "Trained.", "Trained.")[index]
    assert trained.strip() == expected


def test_the_readmes_lines_of_python_run_the_readmes_run(folder: Path) -> None:
    (folder / "run.py").write_text(code_blocks("python", section("Dive into the code"))[0] + "raise SystemExit(exit_code)\n")
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(re.sub(r'^name = .*$', 'name = "tiny"', text, count=1, flags=re.MULTILINE))
    done = subprocess.run([sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
