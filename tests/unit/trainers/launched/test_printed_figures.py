"""The steps and the loss of a launched trainer are those of the last bar that it draws."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.trainers.launched.launch import printed_figures

BEGIN = "steps:   0%|          | 0/60 [00:00<?, ?it/s]\r"
LAST = "steps: 100%|██████████| 60/60 [01:02<00:00,  1.03s/it, avr_loss=0.0912]"


@pytest.mark.parametrize(
    ("output", "figures"),
    [
        (
            f"{BEGIN}\rsteps:  2%|▏    | 1/60 [00:01<01:01, 1.0s/it, avr_loss=0.2]\r{LAST}\nsaved",
            60,
        ),
        (LAST.replace("avr_loss", "Average key norm=0.1, Keys Scaled=0, avr_loss"), 60),
        (LAST.replace("avr_loss=0.0912", "loss=9.12e-2"), 60),
    ],
)
def test_steps_and_loss_are_read_from_the_last_bar(output: str, figures: int) -> None:
    assert printed_figures(output) == {"steps": figures, "loss_end": 0.0912}


@pytest.mark.parametrize(
    ("output", "figures"),
    [
        ("", {}),
        ("no bar, avr_loss=0.5", {}),
        (BEGIN, {}),
        (LAST.replace("0.0912", "nan"), {"steps": 60}),
        (LAST.replace("avr_loss", "val_loss"), {"steps": 60}),
        ("caching: 100%|██| 9/9 [00:01<00:00, 9.0it/s, avr_loss=0.5]", {}),
    ],
)
def test_nothing_is_guessed(output: str, figures: dict[str, Any]) -> None:
    assert printed_figures(output) == figures
