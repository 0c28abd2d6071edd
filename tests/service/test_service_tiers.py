"""With layers masked one by one: the tier that is reported is the tier that is there, and below the bound nothing runs."""

import pytest
from service_harness import Service, command, serving

from worker.sandbox.tiers import ALL_LAYERS, NAMESPACES


def check_tier(service: Service, tier: str, missing: set[str]) -> None:
    """The call, readiness, info and metrics all say it."""
    result = service.run("print(6 * 7)")
    assert (result.status, result.stdout, result.sandbox.tier) == ("ok", "42\n", tier)
    assert set(ALL_LAYERS) - set(result.sandbox.layers) == missing
    assert service.http.get("/readyz").json() == {"status": "ready", "tier": tier}
    info = service.http.get("/v1/info").json()
    assert (info["tier"], info["layers"]) == (tier, result.sandbox.layers)
    tiers = {name: service.metric(f'exec_sandbox_tier{{tier="{name}"}}') for name in "SABCDE"}
    assert tiers == dict.fromkeys("SABCDE", 0.0) | {tier: 1.0}
    assert {layer for layer in ALL_LAYERS if service.metric(f'exec_sandbox_layer{{layer="{layer}"}}') == 1} == set(
        result.sandbox.layers
    )


def test_without_control_groups_tier_b_answers_without_a_warning() -> None:
    with serving(mask_layers='["cgroup"]') as service:
        check_tier(service, "B", {"cgroup"})
        assert "WARNING" not in service.words
        refused = service.http.post("/v1/run", json={"code": "print(1)", "require_tier": "A"})
        assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (
            422,
            "tier_unavailable",
            "$.require_tier",
        )
        assert service.run("print(1)", require_tier="B").status == "ok"


def test_without_uids_tier_c_answers_with_a_warning_that_names_them() -> None:
    with serving(mask_layers='["uid"]') as service:
        check_tier(service, "C", {"uid"})
        assert "WARNING: the sandbox is of tier C" in service.words
        assert "missing: uid (masked by configuration)" in service.words


def test_without_user_namespaces_tier_d_answers_with_a_warning_that_names_them() -> None:
    with serving(mask_layers='["userns"]') as service:
        check_tier(service, "D", {"userns", *NAMESPACES})
        assert "WARNING: the sandbox is of tier D" in service.words
        assert "userns (masked by configuration)" in service.words


def test_without_landlock_tier_c_answers_with_a_warning_that_names_it() -> None:
    with serving(mask_layers='["landlock"]') as service:
        check_tier(service, "C", {"landlock"})
        assert "landlock (masked by configuration)" in service.words


def test_insecure_answers_in_tier_e_with_a_warning() -> None:
    with serving("--insecure", mask_layers='["userns", "landlock"]') as service:
        check_tier(service, "E", {"landlock", "userns", *NAMESPACES})
        assert "WARNING: the sandbox is of tier E" in service.words
        assert "landlock (masked by configuration)" in service.words


def check_refusal(service: Service, words: str) -> None:
    """Documentation and health are there, nothing runs, and it says why."""
    assert service.http.get("/healthz").status_code == 200
    assert service.http.get("/docs").status_code == 200
    assert service.http.get("/v1/info").json()["tier"] == "none"
    for answer in (
        service.http.get("/readyz"),
        service.http.post("/v1/run", json={"code": "print(1)"}),
        service.http.post("/v1/batch", json={"calls": [{"code": "print(1)", "require_tier": "A"}]}),
    ):
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "not_ready"
        assert words in answer.json()["detail"]
        assert "retry-after" in answer.headers
    assert words in service.words
    assert "exec_service doctor " in service.words  # in the words by which it was started
    assert "exec_service up --insecure " in service.words
    assert service.process.poll() is None
    assert service.process.send_signal(15) is None
    assert service.wait() == 0


def test_with_neither_landlock_nor_namespaces_nothing_runs_and_the_two_commands_are_printed() -> None:
    with serving(mask_layers='["userns", "landlock"]') as service:
        check_refusal(service, "landlock (masked by configuration)")


def test_below_the_wanted_tier_nothing_runs() -> None:
    with serving(mask_layers='["cgroup"]', min_tier="A") as service:
        check_refusal(service, "tier A is required and this is tier B")


@pytest.mark.parametrize(("setting", "value"), [("min_tier", "Z"), ("slots", "0"), ("mask_layers", '["cgroup"')])
def test_setting_that_cannot_be_meant_is_refused_by_its_name(setting: str, value: str) -> None:
    ended = command("up", "--port", "0", **{setting: value})
    assert ended.returncode == 2
    assert setting in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
