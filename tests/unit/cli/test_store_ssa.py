"""Server-side apply: complete intent, ownership per manager, list-maps, forced conflicts."""

from typing import Any

from paceline_cli.local import ssa


class Live:
    """An object under several managers."""

    def __init__(self) -> None:
        self.object: dict[str, Any] = {}
        self.owners: ssa.Owners = {}

    def apply(self, manager: str, intent: dict[str, Any]) -> dict[str, Any]:
        self.object, self.owners = ssa.apply(self.object, self.owners, manager, intent)
        return self.object

    def update(self, manager: str, new: dict[str, Any]) -> None:
        self.owners = ssa.changed_by_update(self.owners, manager, self.object, new)
        self.object = new


def test_a_field_that_is_no_longer_applied_goes_and_its_empty_parents_with_it() -> None:
    live = Live()
    live.apply("a", {"spec": {"x": 1, "deep": {"y": {"z": 2}}}})
    assert live.apply("a", {"spec": {"x": 1}}) == {"spec": {"x": 1}}


def test_a_field_of_another_manager_stays() -> None:
    live = Live()
    live.apply("a", {"metadata": {"labels": {"mine": "1", "both": "1"}}})
    live.apply("b", {"metadata": {"labels": {"theirs": "1", "both": "1"}}})
    assert live.apply("a", {"spec": {"x": 1}}) == {
        "spec": {"x": 1},
        "metadata": {"labels": {"theirs": "1", "both": "1"}},
    }
    assert live.apply("b", {}) == {"spec": {"x": 1}}


def test_a_forced_conflict_takes_the_field() -> None:
    live = Live()
    live.apply("a", {"spec": {"replicas": 1}})
    live.apply("b", {"spec": {"replicas": 3}})
    assert live.apply("a", {}) == {"spec": {"replicas": 3}}
    assert live.apply("b", {}) == {}


def test_a_hand_edit_is_put_back_and_a_hand_added_field_stays() -> None:
    live = Live()
    intent = {"spec": {"replicas": 1, "env": [{"name": "A", "value": "1"}]}}
    live.apply("a", intent)
    live.update("hand", {"spec": {"replicas": 9, "paused": True, "env": [{"name": "A", "value": "2"}]}})
    assert live.apply("a", intent) == {"spec": {"replicas": 1, "paused": True, "env": [{"name": "A", "value": "1"}]}}


def test_items_of_a_list_map_are_merged_by_key() -> None:
    live = Live()
    live.apply(
        "a", {"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Old", "status": "True"}]}}
    )
    live.apply("b", {"status": {"conditions": [{"type": "Scaling", "status": "True"}]}})
    result = live.apply("a", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    assert result["status"]["conditions"] == [
        {"type": "Ready", "status": "True"},
        {"type": "Scaling", "status": "True"},
    ]


def test_two_managers_of_one_list_do_not_reorder_it_for_ever() -> None:
    live = Live()
    first, second = {"conditions": [{"type": "A", "status": "1"}]}, {"conditions": [{"type": "B", "status": "1"}]}
    live.apply("a", {"status": first})
    before = live.apply("b", {"status": second})
    assert live.apply("a", {"status": first}) == before
    assert live.apply("b", {"status": second}) == before


def test_the_order_of_env_is_the_order_of_the_intent() -> None:
    live = Live()
    container = {"name": "c", "env": [{"name": "B", "value": "1"}, {"name": "A", "value": "$(B)"}]}
    live.apply("a", {"spec": {"containers": [{"name": "c", "env": container["env"][::-1]}]}})
    result = live.apply("a", {"spec": {"containers": [container]}})
    assert result == {"spec": {"containers": [container]}}


def test_atomic_lists_are_replaced_and_container_ports_are_keyed() -> None:
    live = Live()
    port = {"name": "http", "containerPort": 8000}
    live.apply("a", {"spec": {"args": ["a", "b"], "containers": [{"name": "c", "ports": [port]}]}})
    live.apply("b", {"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 9000, "protocol": "TCP"}]}]}})
    result = live.apply(
        "a", {"spec": {"args": ["b"], "containers": [{"name": "c", "ports": [port | {"name": "web"}]}]}}
    )
    assert result["spec"]["args"] == ["b"]
    assert [p.get("name") for p in result["spec"]["containers"][0]["ports"]] == ["web", None]


def test_an_empty_mapping_that_was_asked_for_stays() -> None:
    live = Live()
    live.apply("a", {"spec": {"volumes": [{"name": "v", "emptyDir": {}}], "x": 1}})
    assert live.apply("a", {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}) == {
        "spec": {"volumes": [{"name": "v", "emptyDir": {}}]}
    }
