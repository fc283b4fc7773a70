"""Demonstrations against TRL's own `SFTTrainer`: which tokens are trained, the loss, and its gradient."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import accumulate_all, gradients_of, make_policy, tiny_model, write_tokenizer
from tests.support.samples import changed
from tests.unit.trainer.batch.test_demonstrations import GENERATION, TEMPLATE, said
from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import ModelConfig
from tidemill.services.trainer.batch.demonstrations import Demonstration, load_demonstrations
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import make_sample


def turns_of(n):
    return [f"w{n} w{(n * k) % 25}" for k in range(1, 3 + 2 * (n % 3))]


CHATS = [{"messages": said(*turns_of(n))} for n in range(1, 9)]
TEXTS = [{"prompt": f"w{n} " * (1 + n % 3), "completion": "w9 " * (n % 4) + f"w{n}"} for n in range(1, 9)]
ANSWERS = [
    {"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]}
    for chat in CHATS
    if len(chat["messages"]) % 2 == 0
]


@pytest.mark.parametrize(
    ("rows", "template", "options"),
    [
        pytest.param([c for c in CHATS if len(c["messages"]) % 2 == 0], GENERATION,
                     {"assistant_only_loss": True}, id="chats"),
        pytest.param(ANSWERS, TEMPLATE, {}, id="prompts and completions as chats"),
        pytest.param(TEXTS, None, {}, id="text"),
    ],
)  # fmt: skip
def test_tokens_loss_and_gradient_are_those_of_trl(tmp_path, rows, template, options):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    folder = tiny_model(tmp_path / "model")
    write_tokenizer(folder, template)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    losses: list[float] = []
    gradients: list[torch.Tensor] = []

    class Trainer(trl.SFTTrainer):
        def training_step(self, *args, **kwargs):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            # A copy: the optimizer's step, which follows the last of them, clips it.
            parts = [p.grad.flatten().clone() for p in self.model.parameters() if p.grad is not None]
            gradients.append(torch.cat(parts))
            return loss

    args = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2,
        gradient_accumulation_steps=len(rows) // 2, max_steps=1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64),
        processing_class=tokenizer,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
    ).train()
    assert len(losses) == len(rows) // 2

    source = {"name": "shown", "kind": "demonstrations", "path": str(path)}
    config = DataConfig.model_validate({"train": [source]})
    (loaded,) = load_demonstrations(config, tokenizer, 0, ModelConfig(path=str(folder), max_model_len=128))
    demonstrations = [prompt for prompt in loaded.prompts if isinstance(prompt, Demonstration)]
    assert len(demonstrations) == len(rows)
    policy = make_policy(torch.float64, model=AutoModelForCausalLM.from_pretrained(folder))
    samples = [
        changed(make_sample(demonstration.trajectory(10**9 + n, 0, 0)), imitation=1.0)
        for n, demonstration in enumerate(demonstrations)
    ]
    sums = accumulate_all(policy, form_micro_batches(samples, 64))
    assert sums.loss_sum / sums.denominator == pytest.approx(sum(losses), rel=1e-6)
    mine = gradients_of(policy) / sums.denominator
    assert ((mine - gradients[-1]).norm() / gradients[-1].norm()).item() < 1e-6
