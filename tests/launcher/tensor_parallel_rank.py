"""A rank of test_tensor_parallel: a model that transformers cut in two while loading, trained by TRL as it comes.

usage: tensor_parallel_rank.py MODEL ROWS OUT TP_SIZE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

MODEL, ROWS, OUT, TP_SIZE = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


def trainer(**config):
    args = SFTConfig(
        output_dir=OUT + ".folder",
        bf16=False,
        report_to=[],
        max_steps=3,
        logging_steps=1,
        max_length=64,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        seed=1,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        model_init_kwargs={"distributed_config": DistributedConfig(tp_size=TP_SIZE)} if TP_SIZE > 1 else None,
        **config,
    )
    return SFTTrainer(model=MODEL, args=args, train_dataset=load_dataset("json", data_files=ROWS, split="train"))


made = trainer(save_strategy="no")
made.train()
local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in made.model.parameters())
told = {"losses": [row["loss"] for row in made.state.log_history if "loss" in row], "parameters": local}
if TP_SIZE > 1:
    try:
        trainer(save_strategy="steps")
    except ValueError as error:
        told["checkpoint"] = str(error)
if os.environ.get("LOCAL_RANK", "0") == "0":
    Path(OUT).write_text(json.dumps(told), encoding="utf-8")
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
