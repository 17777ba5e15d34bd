"""The supervisor's decisions, with processes and a clock that the test plays."""

import signal
from random import Random

import pytest

from triptych.launch.supervisor import ChildState, Phase, RestartPolicy, Supervisor
from triptych.worker.protocol import StartReport

NAMES = ("router", "encode-0", "decode-0", "decode-1")
POLICY = RestartPolicy(
    first_backoff_s=1.0, max_backoff_s=4.0, max_deaths=3, window_s=100.0, start_timeout_s=60.0, stop_grace_s=5.0
)


class FakeProcesses:
    """Records what the supervisor asks for. A signal has no effect of its own: the test says who exits, and when."""

    def __init__(self) -> None:
        self.spawned: list[str] = []
        self.signals: list[tuple[str, signal.Signals]] = []
        self.killed_all = 0

    def spawn(self, name: str) -> None:
        self.spawned.append(name)

    def signal(self, name: str, signum: signal.Signals) -> None:
        self.signals.append((name, signum))

    def kill_all(self) -> None:
        self.killed_all += 1


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.processes = FakeProcesses()
        self.supervisor = Supervisor(
            NAMES,
            first_to_stop="router",
            processes=self.processes,
            clock=lambda: self.now,
            log=self.lines.append,
            is_enough=lambda names: {"router", "encode-0"} <= names and bool({"decode-0", "decode-1"} & names),
            policy=POLICY,
        )
        self.supervisor.start()

    def ready(self, *names: str) -> None:
        for name in names:
            self.supervisor.on_report(name, StartReport(url=f"http://{name}"))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.supervisor.tick()

    def die_and_return(self, name: str) -> None:
        self.supervisor.on_exit(name, "SIGKILL")
        self.pass_time(POLICY.max_backoff_s)
        self.ready(name)

    def state(self, name: str) -> ChildState:
        return self.supervisor.children[name].state


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def serving(scene: Scene) -> Scene:
    scene.ready(*NAMES)
    assert scene.supervisor.phase is Phase.SERVING
    return scene


def test_a_child_is_known_by_the_address_of_its_last_start(serving: Scene) -> None:
    assert serving.supervisor.children["encode-0"].url == "http://encode-0"
    serving.supervisor.on_exit("encode-0", "SIGKILL")
    serving.pass_time(POLICY.first_backoff_s)
    serving.supervisor.on_report("encode-0", StartReport(url="http://elsewhere"))
    assert serving.supervisor.children["encode-0"].url == "http://elsewhere"


def test_every_child_is_started_once(scene: Scene) -> None:
    assert scene.processes.spawned == list(NAMES)


def test_the_cluster_serves_only_when_the_last_child_is_ready(scene: Scene) -> None:
    scene.ready(*NAMES[:-1])
    assert scene.supervisor.phase is Phase.STARTING
    scene.ready(NAMES[-1])
    assert scene.supervisor.phase is Phase.SERVING


def test_the_loaded_share_never_goes_back(scene: Scene) -> None:
    for loaded in (0.2, 0.7, 0.5):
        scene.supervisor.on_report("encode-0", StartReport(loaded=loaded))
    assert scene.supervisor.children["encode-0"].loaded == 0.7


def test_a_death_while_starting_fails_the_whole_start_with_the_childs_own_words(scene: Scene) -> None:
    scene.ready("router")
    scene.supervisor.on_report("encode-0", StartReport(error="the weights are cut short."))
    scene.supervisor.on_exit("encode-0", "exit code 1")
    assert scene.supervisor.phase is Phase.STOPPED
    assert scene.supervisor.failure == "encode-0 died while starting: the weights are cut short."
    assert scene.processes.killed_all == 1


def test_a_death_while_starting_without_words_names_the_signal(scene: Scene) -> None:
    scene.supervisor.on_exit("decode-1", "SIGSEGV")
    assert scene.supervisor.failure == "decode-1 died while starting: SIGSEGV"


def test_a_child_that_makes_no_progress_while_starting_is_killed_and_fails_the_start(scene: Scene) -> None:
    scene.pass_time(59.0)
    scene.supervisor.on_report("encode-0", StartReport(loaded=0.1))
    scene.ready("router", "decode-0", "decode-1")
    scene.pass_time(59.0)
    assert scene.processes.signals == []  # the report began the minute anew
    scene.pass_time(1.0)
    assert scene.processes.signals == [("encode-0", signal.SIGKILL)]
    scene.supervisor.on_exit("encode-0", "SIGKILL")
    assert scene.supervisor.failure == "encode-0 died while starting: no progress for 60 s"


def test_a_stop_while_starting_kills_at_once_and_is_no_failure(scene: Scene) -> None:
    scene.supervisor.stop()
    assert scene.supervisor.phase is Phase.STOPPED
    assert scene.processes.killed_all == 1
    assert scene.supervisor.failure == ""


def test_a_dead_child_is_started_again_after_its_backoff_and_the_others_go_on(serving: Scene) -> None:
    serving.supervisor.on_exit("decode-0", "SIGKILL")
    assert serving.lines == ["decode-0 died (SIGKILL); starting it again in 1 s"]
    serving.pass_time(0.9)
    assert serving.processes.spawned == list(NAMES)
    serving.pass_time(0.1)
    assert serving.processes.spawned == [*NAMES, "decode-0"]
    serving.ready("decode-0")
    assert serving.lines[-1] == "decode-0 is back at http://decode-0"
    assert serving.supervisor.phase is Phase.SERVING


def test_the_backoff_doubles_up_to_its_bound() -> None:
    assert [POLICY.backoff_s(deaths) for deaths in (1, 2, 3, 4, 9)] == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_child_that_keeps_dying_is_given_up_while_another_can_do_its_work(serving: Scene) -> None:
    for _ in range(3):
        serving.die_and_return("decode-0")
    serving.supervisor.on_exit("decode-0", "SIGKILL")
    assert serving.state("decode-0") is ChildState.GIVEN_UP
    assert serving.supervisor.phase is Phase.SERVING
    serving.pass_time(1000.0)
    assert serving.processes.spawned.count("decode-0") == 4


def test_deaths_outside_the_window_are_forgotten(serving: Scene) -> None:
    for _ in range(10):
        serving.die_and_return("decode-0")
        serving.pass_time(POLICY.window_s)
    assert serving.state("decode-0") is ChildState.READY


def test_the_cluster_ends_with_a_sentence_when_nobody_can_do_the_work(serving: Scene) -> None:
    for _ in range(3):
        serving.die_and_return("encode-0")
    serving.supervisor.on_exit("encode-0", "exit code 3")
    assert serving.supervisor.phase is Phase.STOPPED
    assert serving.processes.killed_all == 1
    assert serving.supervisor.failure == "encode-0 cannot be kept alive (exit code 3), and nothing can be served without it"


def test_a_stop_ends_the_router_before_the_workers(serving: Scene) -> None:
    serving.supervisor.stop()
    assert serving.processes.signals == [("router", signal.SIGTERM)]
    serving.supervisor.on_exit("router", "exit code 0")
    assert serving.processes.signals[1:] == [(name, signal.SIGTERM) for name in NAMES[1:]]
    for name in NAMES[1:]:
        assert serving.supervisor.phase is Phase.STOPPING
        serving.supervisor.on_exit(name, "exit code 0")
    assert serving.supervisor.phase is Phase.STOPPED
    assert serving.processes.killed_all == 0


def test_a_child_that_does_not_stop_is_killed_after_the_grace(serving: Scene) -> None:
    serving.supervisor.stop()
    serving.pass_time(POLICY.stop_grace_s)
    assert serving.processes.signals[-1] == ("router", signal.SIGKILL)
    serving.supervisor.on_exit("router", "SIGKILL")
    assert serving.state("encode-0") is ChildState.STOPPING


def test_a_worker_that_dies_while_the_router_stops_is_not_started_again(serving: Scene) -> None:
    serving.supervisor.stop()
    serving.supervisor.on_exit("decode-0", "SIGKILL")
    serving.pass_time(2.0)
    assert serving.processes.spawned == list(NAMES)


def test_a_second_stop_kills_at_once(serving: Scene) -> None:
    serving.supervisor.stop()
    serving.supervisor.stop()
    assert serving.supervisor.phase is Phase.STOPPED
    assert serving.processes.killed_all == 1


def test_a_child_in_backoff_does_not_hold_up_the_stop(serving: Scene) -> None:
    serving.supervisor.on_exit("decode-0", "SIGKILL")
    serving.supervisor.stop()
    for name in ("router", "encode-0", "decode-1"):
        serving.supervisor.on_exit(name, "exit code 0")
    assert serving.supervisor.phase is Phase.STOPPED


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_a_stopped_cluster_has_no_living_child_that_was_not_killed(seed: int) -> None:
    rng, scene = Random(seed), Scene()
    alive: set[str] = set(NAMES)
    for _ in range(60):
        if scene.supervisor.phase is Phase.STOPPED:
            break
        name = rng.choice(NAMES)
        match rng.choices(("ready", "die", "time", "stop"), (6, 3, 3, 0.2))[0]:
            case "ready" if name in alive:
                scene.ready(name)
            case "die" if name in alive:
                alive.discard(name)
                scene.supervisor.on_exit(name, "SIGKILL")
            case "stop":
                scene.supervisor.stop()
            case _:
                before = len(scene.processes.spawned)
                scene.pass_time(rng.uniform(0, 10))
                alive.update(scene.processes.spawned[before:])
        believed = {each.name for each in scene.supervisor.children.values() if each.is_alive}
        if scene.processes.killed_all:
            alive = set()
        else:
            assert believed == alive
    if scene.supervisor.phase is Phase.STOPPED:
        assert not alive
