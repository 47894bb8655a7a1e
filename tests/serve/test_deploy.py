# SPDX-License-Identifier: Apache-2.0
"""What `nnfront deploy` tells Ray, and what it refuses before it asks Ray for anything."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from serving import FOLDER

from nnfront.cli import deploy, main
from nnfront.errors import LoadError


def options(flags: str = "") -> dict[str, Any]:
    return deploy.options(parsed(flags))


def parsed(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    deploy.add_arguments(parser)
    return parser.parse_args(flags.split())


def test_a_replica_takes_as_many_requests_as_it_answers_at_a_time_and_the_others_wait_for_any() -> None:
    found = options("--replicas 3 --max-num-seqs 4 --max-queued 9")
    assert found["num_replicas"] == 3
    assert (found["max_ongoing_requests"], found["max_queued_requests"]) == (4, 9)
    assert found["backpressure_config"]["status_code"] == 429
    assert found["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}
    assert "placement_group_bundles" not in found


def test_the_answers_that_a_replaced_replica_has_begun_may_take_as_long_as_any_answer() -> None:
    assert options("--timeout 30")["graceful_shutdown_timeout_s"] == 30
    assert options()["graceful_shutdown_timeout_s"] == deploy.DRAIN_SECONDS


def test_the_number_of_replicas_follows_the_requests_that_run_or_wait() -> None:
    found = options("--replicas 2 --max-replicas 8 --max-num-seqs 4")
    assert found["autoscaling_config"] == {
        "min_replicas": 1,
        "initial_replicas": 2,
        "max_replicas": 8,
        "target_ongoing_requests": 4,
    }
    assert "num_replicas" not in found


def test_the_ranks_of_a_replica_are_a_group_on_one_machine() -> None:
    found = options("--tp 2 --cpus 3 --device cuda")
    assert found["placement_group_bundles"] == [{"CPU": 3, "GPU": 1}] * 2
    assert found["placement_group_strategy"] == "STRICT_PACK"
    assert found["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--replicas 0", "--replicas is 0\n  help: give a number of at least 1"),
        ("--tp 0", "--tp is 0\n  help: give a number of at least 1"),
        ("--cpus 0", "--cpus is 0\n  help: give a number of at least 1"),
        ("--min-replicas 1", "--min-replicas is given without --max-replicas"),
        (
            "--replicas 3 --max-replicas 2",
            "--replicas 3 is not between --min-replicas 1 and --max-replicas 2",
        ),
        (
            "--min-replicas 2 --max-replicas 2",
            "--replicas 1 is not between --min-replicas 2 and --max-replicas 2",
        ),
        (
            "--min-replicas -1 --max-replicas 2",
            "--replicas 1 is not between --min-replicas -1 and --max-replicas 2",
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(flags: str, said: str) -> None:
    with pytest.raises(LoadError) as raised:
        options(flags)
    assert str(raised.value) == said


def test_a_machine_without_room_for_all_replicas_is_refused() -> None:
    deploy.check_room(parsed("--replicas 2 --tp 2"), {"CPU": 4.0})
    with pytest.raises(LoadError) as raised:
        deploy.check_room(parsed("--replicas 2 --tp 2 --device cuda"), {"CPU": 4.0, "GPU": 1.0})
    assert str(raised.value) == (
        "2 replicas of 2 processes take 4 GPUs, and this machine has 1\n"
        "  help: lower --replicas or --tp, or name a cluster by the variable RAY_ADDRESS"
    )


def test_of_what_ray_says_of_a_failure_the_error_is_shown() -> None:
    traceback = 'Deploying failed.\nThe deployment failed to start 1 times.\n  File "a.py", line 1\n    load()\n    ^^^^^^\n'
    error = "  nnfront.errors.LoadError: x is not a folder\n    help: give the path of one\n"
    assert deploy.reason(traceback + error) == ["x is not a folder", "help: give the path of one"]
    assert deploy.reason("1\n2\n3\n4\n5\n6\n") == ["2", "3", "4", "5", "6"]


def test_without_ray_one_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["deploy", str(FOLDER)]) == 1
    assert capsys.readouterr().err == (
        "error: the package 'ray' is not installed\n  help: pip install 'nnfront[distributed]'\n"
    )


def test_ranks_of_torchrun_do_not_deploy() -> None:
    """Each would deploy the same once more; the flag --tp is Ray's to carry out."""
    assert not hasattr(parsed("--tp 2"), "tp")


def test_a_ray_that_is_named_and_not_there_is_refused_instead_of_another_one_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(address: str, **_: object) -> None:
        raise ConnectionError(address)

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(LoadError) as raised:
        deploy._connect(SimpleNamespace(init=init))
    assert str(raised.value) == (
        "no Ray answers at head:6379, which RAY_ADDRESS names\n  help: without RAY_ADDRESS one is started here"
    )
