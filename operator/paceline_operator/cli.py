"""`paceline-operator`: flags to settings, then run until a signal or until leadership is lost.

Exit codes: 0 stopped by a signal, 1 failed or lost the lease (to be started again), 2 bad input or missing CRDs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import uuid
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from prometheus_client import CollectorRegistry, start_http_server

from paceline_api.kube import KubeError
from paceline_api.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT
from paceline_kube import OfficialKubeClient
from paceline_operator.app import SYSTEM_CLOCK, Operator
from paceline_operator.feed import OWN_KINDS
from paceline_operator.informer import Informer, Sink
from paceline_operator.leader import Leader
from paceline_operator.planner.model import PlanSettings
from paceline_operator.probes import HealthServer
from paceline_operator.settings import Settings

log = logging.getLogger("paceline_operator")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_WATCHDOG_S = 1.0
_DEFAULTS = Settings()
_PLAN = PlanSettings()

NamespaceOption = Annotated[str | None, typer.Option(help="Namespace to watch. Default: every namespace.")]
KubeconfigOption = Annotated[
    Path | None, typer.Option(help="Kubeconfig file. Default: in-cluster, else ~/.kube/config.")
]
HostOption = Annotated[str, typer.Option(help="Address that metrics and health listen on.")]
MetricsPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of /metrics.")]
HealthPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of /health/live and /health/ready.")]
ImageEngine = Annotated[str, typer.Option(help="Engine image of services that set none.")]
ImageRouter = Annotated[str, typer.Option(help="Router image.")]
ImageKVStore = Annotated[str, typer.Option("--image-kvstore", help="Node server image of KVStores that set none.")]
LeaderElect = Annotated[bool, typer.Option(help="Hold a Lease while working; a second operator then waits.")]
LeaseNamespace = Annotated[str, typer.Option(envvar="PACELINE_LEASE_NAMESPACE", help="Namespace of the Lease.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Reconciles at once.")]
ResyncS = Annotated[float, typer.Option(min=1, help="Seconds between comparisons with real lists, +-20 %.")]
StatusIntervalS = Annotated[
    float, typer.Option(min=0, help="Fewest seconds between status writes that change figures only.")
]
InformerName = Annotated[str, typer.Option(help="What watches the API: kopf or watch.")]


def _bad(message: str) -> NoReturn:
    sys.stderr.write(f"paceline-operator: {message}\n")
    raise typer.Exit(2)


@app.command()
def run(
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    host: HostOption = "0.0.0.0",
    metrics_port: MetricsPort = OPERATOR_METRICS_PORT,
    health_port: HealthPort = OPERATOR_HEALTH_PORT,
    image_engine: ImageEngine = _PLAN.image_engine,
    image_router: ImageRouter = _PLAN.image_router,
    image_kvstore: ImageKVStore = _PLAN.image_kvstore,
    leader_elect: LeaderElect = True,
    lease_namespace: LeaseNamespace = _DEFAULTS.lease_namespace,
    workers: Workers = _DEFAULTS.workers,
    resync_s: ResyncS = _DEFAULTS.resync_s,
    status_interval_s: StatusIntervalS = _DEFAULTS.status_interval_s,
    informer: InformerName = "kopf",
) -> None:
    """Run the operator."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # kopf logs every object it sees; our own log says what was done.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # That it takes no signals is meant: this process does.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    if informer not in ("kopf", "watch"):
        _bad(f"--informer {informer!r} is not known: use kopf or watch")
    if kubeconfig is not None and not kubeconfig.is_file():
        _bad(f"--kubeconfig {kubeconfig}: there is no such file")
    settings = Settings(
        namespace=namespace,
        plan=PlanSettings(image_engine, image_router, image_kvstore),
        workers=workers,
        resync_s=resync_s,
        status_interval_s=status_interval_s,
        lease_namespace=lease_namespace,
    )
    process = _Process(_connected(kubeconfig), settings, kubeconfig, informer)
    process.listen(host, metrics_port, health_port)
    raise typer.Exit(process.run(leader_elect))


def _connected(kubeconfig: Path | None) -> OfficialKubeClient:
    """A client, once the API server answers and serves our kinds; exits with a clear line otherwise."""
    try:
        client = OfficialKubeClient.connect(kubeconfig)
        missing = [kind.plural for kind in OWN_KINDS if not client.served(kind)]
    except KubeError as error:
        _bad(f"cannot reach the Kubernetes API: {error.message}")
    if missing:
        names = ", ".join(missing)
        _bad(f"the API server does not serve {names} of paceline.dev: install the CRDs (kubectl apply -k crds)")
    return client


class _Process:
    """One operator with its ports, its lease and its end."""

    def __init__(self, client: OfficialKubeClient, settings: Settings, kubeconfig: Path | None, informer: str) -> None:
        self._client = client
        self._settings = settings
        self._registry = CollectorRegistry()
        self._stop = threading.Event()
        self._started = False

        def kopf_informer(sink: Sink) -> Informer:
            from paceline_operator.handlers import KopfInformer

            return KopfInformer(settings.namespace, sink, kubeconfig)

        factory = kopf_informer if informer == "kopf" else None
        self._operator = Operator(client, settings, informer=factory, registry=self._registry)
        # Unique even where two processes share a host name: an identity held twice would mean two leaders.
        identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4()}"
        self._leader = Leader(
            client,
            settings.lease_namespace,
            settings.lease_name,
            identity,
            SYSTEM_CLOCK,
            duration_s=settings.lease_duration_s,
        )
        self._elects = False

    def listen(self, host: str, metrics_port: int, health_port: int) -> None:
        try:
            HealthServer(host, health_port, self._live, self._ready).start()
            start_http_server(metrics_port, addr=host, registry=self._registry)
        except OSError as error:
            _bad(f"cannot listen on {host}:{metrics_port} or :{health_port}: {error.strerror}; choose other ports")

    def run(self, leader_elect: bool) -> int:
        """Blocks until a signal (0), or until the operator cannot go on (1)."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self._stop.set())
        self._elects = leader_elect
        watchdog = threading.Thread(target=self._watch_operator, name="watchdog", daemon=True)
        watchdog.start()
        if leader_elect:
            # The first lists may take longer than a lease lives, so they do not run on the thread that renews it.
            begin = threading.Thread(target=self._begin, name="begin", daemon=True)
            self._leader.run(self._stop, begin.start, lambda: self._fail("lost the lease"))
        else:
            self._begin()
            self._stop.wait()
        if self._started:
            self._operator.stop()
        if leader_elect:
            # Only now may the next one start.
            self._leader.release()
        return 0

    def _begin(self) -> None:
        try:
            self._operator.start()
            self._started = True
            self._operator.metrics.leads(True)
            log.info("Reconciling %s", self._settings.namespace or "every namespace")
        except KubeError as error:
            self._fail(str(error))
        except Exception as error:
            # On its own thread it would leave a leader that does nothing.
            log.exception("The start failed")
            self._fail(f"the start failed: {error!r}")

    def _fail(self, reason: str) -> NoReturn:
        # Others may lead by now, and a thread may hang in a request: nothing is asked to finish.
        log.error("Stopping: %s", reason)
        os._exit(1)

    def _watch_operator(self) -> None:
        while not self._stop.wait(_WATCHDOG_S):
            if not self._started:
                continue
            if self._elects and not self._leader.leading:
                self._fail("lost the lease")
            if problem := self._operator.problem:
                self._fail(problem)

    def _live(self) -> str | None:
        if self._started and self._elects and not self._leader.leading:
            return "the lease is stale"
        return self._operator.problem if self._started else None

    def _ready(self) -> str | None:
        # A standby is ready too: it is a healthy replica that waits for the lease.
        return self._operator.problem if self._started else None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
