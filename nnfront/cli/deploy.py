# SPDX-License-Identifier: Apache-2.0
"""Serve a language model by several replicas on Ray, on this machine or on a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Mapping
from typing import Any

from nnfront.cli import serve
from nnfront.errors import LoadError
from nnfront.packages import package

ADDRESS_VARIABLE = "RAY_ADDRESS"
DRAIN_SECONDS = 600.0
"""How long a replica that is replaced may take for the answers it has begun, where --timeout does not say."""

_OUR_ERROR = re.compile(r"\s*nnfront\.[\w.]+: ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        help="what the deployment is called; default the model's name. A second one of this name replaces the first, replica by replica",
    )
    parser.add_argument(
        "--route-prefix", default="/", metavar="PATH", help="where its addresses begin; default /"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="copies of the model; default 1")
    parser.add_argument(
        "--min-replicas", type=int, metavar="N", help="with --max-replicas: the fewest copies; default 1"
    )
    parser.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="begin with --replicas copies, and have as many as requests take that run or wait, up to N",
    )
    parser.add_argument(  # this process starts no ranks, so that it has no `tp` of its own
        "--tp", dest="gang", type=int, default=1, metavar="N",
        help="divide each copy among N processes of one machine, on N GPUs with --device cuda",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", type=int, default=1, metavar="N", help="CPUs, and threads, of each process; default 1"
    )
    serve.add_serving_arguments(parser)


def main(args: argparse.Namespace) -> int:
    chosen = options(args)
    serve.engine_parts()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports to its makers unless told otherwise
    ray, ray_serve = (package(name, "distributed") for name in ("ray", "ray.serve"))
    from nnfront.cli.replica import deployment

    args.api_key, args.path = serve.keys(args), os.path.abspath(args.path)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    name = args.name or serve.served_name(args)
    is_ours = _connect(ray)
    if is_ours:
        check_room(args, ray.cluster_resources())
    ray_serve.start(http_options={"host": args.host, "port": args.port})
    try:
        ray_serve.run(deployment(args, chosen), name=name, route_prefix=args.route_prefix)
    except RuntimeError as error:
        found = ray_serve.status().applications.get(name)
        said = [each.message for each in found.deployments.values()] if found else []
        raise LoadError(
            f"the deployment {name!r} did not start",
            details=reason("\n".join([str(error), *said])),
        ) from None
    where = ray.get_runtime_context().gcs_address
    print(
        f"deployed {name!r} at http://{args.host}:{args.port}{args.route_prefix}; it ends with this command. {ADDRESS_VARIABLE}={where} names its Ray"
        if is_ours
        else f"deployed {name!r} at {args.route_prefix} on the Ray at {where}",
        file=sys.stderr,
        flush=True,
    )
    if is_ours:
        _wait_for_signal()
        ray_serve.shutdown()
    ray.shutdown()
    return 0


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What Ray is told of a deployment. Raises LoadError for numbers that do not fit together."""
    for flag in ("replicas", "max_replicas", "gang", "cpus", "max_num_seqs"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            shown = {"gang": "tp"}.get(flag, flag).replace("_", "-")
            raise LoadError(f"--{shown} is {value}", help="give a number of at least 1")
    rank = {kind: count for kind, count in _of_process(args).items() if count}
    found: dict[str, Any] = {
        "max_ongoing_requests": args.max_num_seqs,  # the others wait where any replica can take them
        "max_queued_requests": args.max_queued,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": args.timeout or DRAIN_SECONDS,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": rank["CPU"], "num_gpus": rank.get("GPU", 0)},
    }
    if args.gang > 1:
        # Ranks of one machine: they meet at its own address, and end one that hangs by its process number.
        found |= {"placement_group_bundles": [rank] * args.gang, "placement_group_strategy": "STRICT_PACK"}
    if args.max_replicas is None:
        if args.min_replicas is not None:
            raise LoadError("--min-replicas is given without --max-replicas")
        return {**found, "num_replicas": args.replicas}
    fewest = 1 if args.min_replicas is None else args.min_replicas
    if not 0 <= fewest <= args.replicas <= args.max_replicas:
        raise LoadError(
            f"--replicas {args.replicas} is not between --min-replicas {fewest} and --max-replicas {args.max_replicas}"
        )
    scaling = {
        "min_replicas": fewest,
        "initial_replicas": args.replicas,
        "max_replicas": args.max_replicas,
        "target_ongoing_requests": args.max_num_seqs,
    }
    return {**found, "autoscaling_config": scaling}


def _of_process(args: argparse.Namespace) -> dict[str, int]:
    """What one process takes of a machine."""
    from nnfront.backends.registry import backend_of  # here: `--help` does without torch

    return {"CPU": args.cpus, "GPU": backend_of(args.device or "cpu").gpus}


def check_room(args: argparse.Namespace, there: Mapping[str, float]) -> None:
    """Raise LoadError if the first replicas cannot all run on what a Ray has, which would wait for more without end."""
    processes = args.replicas * args.gang
    for kind, each in _of_process(args).items():
        count = processes * each
        if count > there.get(kind, 0):
            raise LoadError(
                f"{args.replicas} replicas of {args.gang} processes take {count} {kind}s, and this machine has {there.get(kind, 0):.0f}",
                help=f"lower --replicas or --tp, or name a cluster by the variable {ADDRESS_VARIABLE}",
            )


def reason(message: str) -> list[str]:
    """The lines of Ray's account of a failure, a traceback for the most part, that say why: those of our error, else the last few."""
    lines = textwrap.dedent(message).strip().splitlines()
    starts = [at for at, line in enumerate(lines) if _OUR_ERROR.match(line)]
    return [_OUR_ERROR.sub("", line).strip() for line in (lines[starts[-1] :] if starts else lines[-5:])]


def _connect(ray: Any) -> bool:
    """Join the Ray that RAY_ADDRESS names or that runs on this machine, else start one here; return whether it was started."""
    quiet = {"log_to_driver": False, "logging_level": "WARNING"}
    address = os.environ.get(ADDRESS_VARIABLE) or "auto"
    if address != "local":
        try:
            ray.init(address, **quiet)
            return False
        except ConnectionError:
            if address != "auto":
                raise LoadError(
                    f"no Ray answers at {address}, which {ADDRESS_VARIABLE} names",
                    help=f"without {ADDRESS_VARIABLE} one is started here",
                ) from None
    ray.init("local", include_dashboard=False, **quiet)
    return True


def _wait_for_signal() -> None:
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()
