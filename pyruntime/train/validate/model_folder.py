"""Checks the folder that an option names as a Hugging Face model, and says what another folder is."""

from __future__ import annotations

from pathlib import Path

from pyruntime.train.errors import ConfigError
from pyruntime.train.validate.adapter_options import CONFIG as ADAPTERS


def check_model_folder(option: str, folder: str) -> None:
    """Raises ConfigError, which begins with `option` and says what to give instead, unless the folder holds a
    config.json: it is a run's, holds adapters, or is not there."""
    path = Path(folder)
    if (path / "config.json").is_file():
        return
    if not path.is_dir():
        raise ConfigError(
            f"{option} {folder}: there is no such folder; download or save the model, and give its folder."
        )
    if (path / ADAPTERS).is_file():
        raise ConfigError(
            f"{option} {folder}: it holds adapters and no model; merge them (python -m pyruntime convert "
            "--source RUN_DIR --target merged --merge true) and give merged, or train on with "
            "--model.init_from of their model and --lora.init_from."
        )
    if (path / "model" / "config.json").is_file():
        raise ConfigError(f"{option} {folder}: it is the folder of a run; give {path / 'model'}.")
    if (path / "adapter" / ADAPTERS).is_file():
        raise ConfigError(
            f"{option} {folder}: it is the folder of a run that trained adapters; merge them (python -m "
            f"pyruntime convert --source {folder} --target merged --merge true) and give merged."
        )
    raise ConfigError(
        f"{option} {folder}: it holds no config.json; give a Hugging Face folder of a Llama or a relative."
    )
