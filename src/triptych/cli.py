"""The command line: `triptych serve`, `triptych worker`, `triptych route`.

Must start fast: nothing here imports torch, and what only one command needs is imported by that command.
"""

import inspect
import os
import secrets
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from triptych.config import ClusterLayout, EngineConfig, Role
from triptych.errors import ConfigError, TriptychError
from triptych.launch.settings import SECTIONS, SETTINGS, sections_from
from triptych.worker.protocol import StartReport

app = typer.Typer(
    name="triptych",
    help="Serve a multimodal language model as encode, prefill and decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a hub id, or 'demo' for the bundled model.")]
Layout = Annotated[str | None, typer.Option("--layout", help="Roles with counts, such as E1P1D1, E1PD2, EP1D1 or EPD1.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="Name under which clients ask for the model.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt plus answer, in tokens.")]
MaxInFlight = Annotated[int, typer.Option("--max-in-flight", min=1, help="Requests at once before new ones get 429.")]
RequestTimeout = Annotated[float, typer.Option("--request-timeout-s", min=0.001, help="A request's deadline, in seconds.")]
WorkerWait = Annotated[
    float, typer.Option("--worker-wait-s", min=0.0, help="Seconds that a request waits for a worker that is gone or full.")
]
EncodeTimeout = Annotated[
    float, typer.Option("--encode-timeout-s", min=0.001, help="Seconds until an encode is given to another worker.")
]
NumWorkers = Annotated[int | None, typer.Option(min=0, help="How many workers of this stage.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before a command."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a flag for every setting of settings.py; they arrive in its `**settings`."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=setting.default,
            annotation=Annotated[
                setting.type, typer.Option(setting.declaration, help=setting.help, rich_help_panel=SECTIONS[setting.section][1])
            ],
        )
        for setting in SETTINGS
    ]
    command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return command


@app.command()
@_with_settings
def serve(
    model: Model,
    *,
    encode: NumWorkers = None,
    prefill: NumWorkers = None,
    decode: NumWorkers = None,
    layout: Layout = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_in_flight: MaxInFlight = 256,
    request_timeout_s: RequestTimeout = 600.0,
    worker_wait_s: WorkerWait = 15.0,
    encode_timeout_s: EncodeTimeout = 20.0,
    **settings: Any,
) -> None:
    """Start a router and the workers of a layout, and serve until Ctrl-C.

    With neither --layout nor counts, one worker does everything (EPD1). TRIPTYCH_CLUSTER_SECRET in the environment lets workers join
    that are started by hand; without it, each start makes a secret of its own.
    """
    # Late for start-up: 0.2 s that `triptych --help` and a mistyped flag need not wait.
    from triptych.launch.launcher import serve as run
    from triptych.launch.options import ServeOptions, choose_layout, cluster_secret, free_port, resolve_device, worker_configs
    from triptych.models.inspect import resolve_model
    from triptych.router.options import RouterOptions

    chosen = choose_layout(layout, encode, prefill, decode)
    secret = cluster_secret(os.environ) or secrets.token_hex(32)
    sections = sections_from(settings)
    port = free_port(host, port)
    device = resolve_device(sections["device"].device)
    config = resolve_model(model, name=served_model_name, dtype=dtype, max_model_len=max_model_len, device=device)
    router = RouterOptions(
        model=config,
        host=host,
        port=port,
        layout=chosen,
        media=sections["media"],
        max_in_flight=max_in_flight,
        request_timeout_s=request_timeout_s,
        worker_wait_s=worker_wait_s,
        encode_timeout_s=encode_timeout_s,
        cluster_secret=secret,
    )
    run(ServeOptions(chosen, router, worker_configs(chosen, config, sections, secret)))


@app.command()
@_with_settings
def worker(
    model: Model,
    *,
    role: Annotated[str, typer.Option("--role", help="The worker's stages: E, P, D, EP, PD, ED or EPD.")],
    router: Annotated[str | None, typer.Option("--router", metavar="URL", help="Router to register with.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    served_model_name: ServedName = None,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    **settings: Any,
) -> None:
    """Start one worker by hand and register it with a router; both need the same TRIPTYCH_CLUSTER_SECRET in their environment."""
    # Late for start-up, as above.
    from triptych.launch.options import cluster_secret, resolve_device

    secret = cluster_secret(os.environ)
    # Torch takes seconds: a mistake is told before it.
    from triptych.models.inspect import resolve_model
    from triptych.worker.app import run_worker

    sections = sections_from(settings)
    device = resolve_device(sections["device"].device)
    config = resolve_model(model, name=served_model_name, dtype=dtype, max_model_len=max_model_len, device=device)
    engine = EngineConfig(model=config, role=Role.parse(role), is_alone=router is None, cluster_secret=secret, **sections)
    run_worker(engine, host=host, port=port, router_url=router, report=_print_report)


@app.command()
@_with_settings
def route(
    model: Model,
    *,
    layout: Layout = None,
    workers: Annotated[list[str], typer.Option("--worker", metavar="URL", help="A worker that runs already.")] = [],  # noqa: B006
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    max_in_flight: MaxInFlight = 256,
    request_timeout_s: RequestTimeout = 600.0,
    worker_wait_s: WorkerWait = 15.0,
    encode_timeout_s: EncodeTimeout = 20.0,
    **settings: Any,
) -> None:
    """Start the router by hand. Workers that are not named register themselves; all share one TRIPTYCH_CLUSTER_SECRET."""
    # Late for start-up, as above.
    from triptych.launch.options import cluster_secret, free_port
    from triptych.models.inspect import resolve_model
    from triptych.router.options import RouterOptions
    from triptych.router.router import run_router

    sections = sections_from(settings)
    config = resolve_model(model, name=served_model_name)
    options = RouterOptions(
        model=config,
        host=host,
        port=free_port(host, port),
        layout=ClusterLayout.parse(layout) if layout else None,  # None: whoever comes
        worker_urls=tuple(workers),
        media=sections["media"],
        max_in_flight=max_in_flight,
        request_timeout_s=request_timeout_s,
        worker_wait_s=worker_wait_s,
        encode_timeout_s=encode_timeout_s,
        cluster_secret=cluster_secret(os.environ),
    )
    run_router(options)


def _print_report(report: StartReport) -> None:
    if report.url:
        print(f"serving on {report.url}", flush=True)


def main() -> None:
    """The entry point: a mistake is one sentence on stderr and exit code 2, a failed start 1; never a traceback."""
    try:
        app()
    except TriptychError as error:
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # a part that was started by hand, and has cleaned up
        sys.exit(130)
