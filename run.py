"""Compress, generate and score: the Hydra entry point. `python run.py --help` lists the settings."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


def refuse_slips(arguments: list[str]) -> None:
    """Stop at what Hydra would accept silently, or refuse without telling how it is meant."""
    seen: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key.startswith("-"):
            continue
        if value.startswith("min(") and key.endswith("neighbors"):
            cap = value[4:].split(",")[0]
            sys.exit(f"error: {argument} is not Hydra's grammar: write {key}=auto{cap} for min({cap}, L)")
        if key in seen:
            sys.exit(f"error: {key} is given twice, as {seen[key]} and as {value}: keep one")
        seen[key] = value


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config")
def main(config: DictConfig) -> None:
    """Run one cell; a multirun goes through the launcher in `hydra_plugins` to the same place."""
    from graphkv import shards  # after Hydra: --help and a typing error answer at once

    shards.main([config], HydraConfig.get().launcher)


if __name__ == "__main__":
    refuse_slips(sys.argv[1:])
    main()
