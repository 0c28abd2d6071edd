"""What each container may do, in each scenario, word for word; who may talk to whom; and which files hold the profiles."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from chart_harness import CHART, ROOT, SCENARIOS, all_of, container, one, pods, refusal, render

from worker.sandbox.inside import seccomp

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)

PLAIN = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
CAPABILITIES = {"drop": ["ALL"], "add": ["SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL", "SYS_RESOURCE"]}
ROOT_OF_SOMETHING = {
    "runAsUser": 0,
    "runAsGroup": 10001,
    "allowPrivilegeEscalation": True,
    "readOnlyRootFilesystem": True,
    "capabilities": CAPABILITIES,
}
USERNS = ROOT_OF_SOMETHING | {
    "procMount": "Unmasked",
    "seccompProfile": {"type": "Localhost", "localhostProfile": "exec-service/runner.json"},
    "appArmorProfile": {"type": "Localhost", "localhostProfile": "exec-service-runner"},
}
RUNNER = {
    "minimal": USERNS,
    "production": USERNS,
    "keda": USERNS,
    "gvisor": ROOT_OF_SOMETHING | {"seccompProfile": {"type": "RuntimeDefault"}},
    "unprivileged": PLAIN,
}
POD = {
    "minimal": {"hostUsers": False},
    "production": {"hostUsers": False},
    "keda": {"hostUsers": False},
    "gvisor": {"runtimeClassName": "gvisor"},
    "unprivileged": {},
}


def workers(scenario: str, *arguments: str) -> list[dict[str, Any]]:
    return [pod for name, pod in pods(render(scenario, *arguments)).items() if "-worker-" in name]


@each_scenario
def test_security_context_of_the_runner_is_that_of_its_scenario(scenario: str) -> None:
    for pod in workers(scenario):
        assert container(pod, "runner")["securityContext"] == RUNNER[scenario]
        assert {key: pod[key] for key in ("hostUsers", "runtimeClassName") if key in pod} == POD[scenario]
        assert pod["securityContext"] == {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}


@each_scenario
def test_everything_else_has_no_privilege(scenario: str) -> None:
    for name, pod in pods(render(scenario)).items():
        for found in pod["containers"]:
            if found["name"] == "valkey":
                context = {**found["securityContext"], "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
                assert context == PLAIN | {"runAsUser": 999, "runAsGroup": 999}
                assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
            elif found["name"] != "runner":
                assert found["securityContext"] == PLAIN, (name, found["name"])


@each_scenario
def test_runner_has_no_secret_no_variable_and_no_port(scenario: str) -> None:
    for pod in workers(scenario):
        runner = container(pod, "runner")
        assert not {"env", "envFrom", "ports"} & runner.keys()
        mounted = {mount["name"] for mount in runner["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert all(set(volumes[name]) == {"name", "emptyDir"} for name in mounted)
        shared = mounted & {mount["name"] for mount in container(pod, "worker")["volumeMounts"]}
        assert shared == {"runner"}  # the socket between the two, and nothing else


@each_scenario
def test_no_pod_has_a_token_or_the_names_of_other_services(scenario: str) -> None:
    for pod in pods(render(scenario)).values():
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod.get("shareProcessNamespace", False) is False


@each_scenario
def test_nothing_on_a_node_is_touched_but_by_the_installer_of_profiles(scenario: str) -> None:
    objects = render(scenario)
    for name, pod in pods(objects).items():
        paths = {volume["hostPath"]["path"] for volume in pod.get("volumes", []) if "hostPath" in volume}
        installer = name.endswith("-profiles")
        assert paths == ({"/var/lib/kubelet/seccomp", "/sys/kernel/security"} if installer else set())
        privileged = [
            c["name"] for c in pod["containers"] + pod.get("initContainers", []) if c["securityContext"].get("privileged")
        ]
        assert privileged == []
    assert bool(all_of(objects, "DaemonSet")) == (scenario in ("minimal", "production", "keda"))


def test_installer_of_profiles_has_the_one_capability_that_it_needs() -> None:
    [install] = pods(render("minimal"))["rel-exec-service-profiles"]["initContainers"]
    assert install["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["MAC_ADMIN"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        "appArmorProfile": {"type": "Unconfined"},
        "seLinuxOptions": {"type": "spc_t"},
    }


def test_runner_must_be_in_a_user_namespace_where_the_pod_says_so() -> None:
    assert ["--user-namespace" in container(pod, "runner")["args"] for pod in workers("minimal")] == [True]
    assert "--user-namespace" not in container(workers("gvisor")[0], "runner")["args"]


def test_runner_is_told_by_the_chart_what_its_worker_can_have() -> None:
    [pod] = workers("minimal", "--set", "worker.config.max_sessions=0", "--set", "worker.config.slots=5")
    wanted = {"--min-tier=B", "--uid-base=2000000000", "--max-slots=5", "--max-sessions=0", "--user-namespace"}
    assert set(container(pod, "runner")["args"]) == wanted
    assert "--min-tier=E" in container(workers("gvisor")[0], "runner")["args"]
    assert "--min-tier=D" in container(workers("unprivileged")[0], "runner")["args"]
    [pod] = workers("minimal", "--set", "worker.config.uid_base=null")  # the runner's own default then
    assert not any("uid-base" in word for word in container(pod, "runner")["args"])


def test_privileged_profile_is_there_for_old_clusters_and_says_what_it_is() -> None:
    [pod] = workers("minimal", "--set", "worker.sandbox.profile=privileged")
    assert container(pod, "runner")["securityContext"] == {
        "runAsUser": 0, "runAsGroup": 10001, "privileged": True, "readOnlyRootFilesystem": True,
    }  # fmt: skip
    assert "hostUsers" not in pod
    # Two such pods on a node must not take the same user ids; with user namespaces of their own they cannot.
    assert {"name": "runner-state", "hostPath": {"path": "/run/exec-service", "type": "DirectoryOrCreate"}} in pod["volumes"]


def test_apparmor_can_be_left_out_on_nodes_without_it() -> None:
    [pod] = workers("minimal", "--set", "worker.sandbox.appArmorProfile=null")
    assert container(pod, "runner")["securityContext"] == {
        key: value for key, value in USERNS.items() if key != "appArmorProfile"
    }


@each_scenario
def test_network_is_closed_but_for_what_is_named(scenario: str) -> None:
    objects = render(scenario)
    everything = one(objects, "NetworkPolicy", "")["spec"]
    assert everything == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "exec-service", "app.kubernetes.io/instance": "rel"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    worker = one(objects, "NetworkPolicy", "-worker")["spec"]
    assert [rule["ports"] for rule in worker["ingress"]] == [[{"port": "metrics", "protocol": "TCP"}]]
    assert {port["port"] for rule in worker["egress"] for port in rule["ports"]} == {53, 6379}
    gateway = one(objects, "NetworkPolicy", "-gateway")["spec"]
    assert {port["port"] for rule in gateway["ingress"] for port in rule["ports"]} == {"http", "grpc", "metrics"}
    assert {port["port"] for rule in gateway["egress"] for port in rule["ports"]} == {53, 6379}


def test_jobs_worker_reaches_the_gateways_and_the_queue_and_nobody_reaches_it() -> None:
    objects = render("production")
    jobs = one(objects, "NetworkPolicy", "-jobs")["spec"]
    assert "ingress" not in jobs and jobs["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in jobs["egress"] for port in rule["ports"]] == ["http", 6379, 53, 53]
    own = {"app.kubernetes.io/name": "exec-service", "app.kubernetes.io/instance": "rel"}
    assert jobs["egress"][0]["to"] == [{"podSelector": {"matchLabels": own | {"app.kubernetes.io/component": "gateway"}}}]
    allowed = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["test", "jobs"]}
    doors = one(objects, "NetworkPolicy", "-gateway")["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": own, "matchExpressions": [allowed]}} in doors


def test_jobs_worker_has_no_privilege_no_key_and_no_port() -> None:
    pod = pods(render("production"))["rel-exec-service-jobs"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    jobs = container(pod, "jobs")
    assert jobs["securityContext"] == PLAIN and "ports" not in jobs
    assert [set(volume) - {"name"} for volume in pod["volumes"]] == [{"persistentVolumeClaim"}, {"emptyDir"}]
    assert [variable["name"] for variable in jobs["env"]] == ["EXEC_REDIS"]


def test_bulk_jobs_get_the_server_of_their_own_and_its_password_from_a_secret_alone() -> None:
    own = pods(render("production", "--set", "jobs.redis.existingSecret.name=exec-jobs"))
    found = {"name": "EXEC_JOBS_REDIS", "valueFrom": {"secretKeyRef": {"name": "exec-jobs", "key": "url"}}}
    for name in ("gateway", "jobs"):
        assert found in container(own[f"rel-exec-service-{name}"], name)["env"]
    assert "jobs.redis.url: has a password" in refusal("production", "--set", "jobs.redis.url=redis://:secret@jobs:6379/0")


def test_clouds_credentials_are_never_on_the_way_to_redis() -> None:
    policy = one(render("unprivileged"), "NetworkPolicy", "-worker")["spec"]
    blocks = [peer["ipBlock"] for rule in policy["egress"] for peer in rule.get("to", [])]
    assert blocks == [{"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}, {"cidr": "::/0", "except": ["fd00:ec2::254/128"]}]


def test_keys_and_passwords_reach_only_the_gateway_and_the_queue() -> None:
    objects = render("keda")
    for name, pod in pods(objects).items():
        secrets = {volume["secret"]["secretName"] for volume in pod.get("volumes", []) if "secret" in volume}
        assert secrets == ({"exec-keys"} if name.endswith("-gateway") else set())


def seccomp_profile() -> dict[str, Any]:
    profile: dict[str, Any] = json.loads((CHART / "files" / "seccomp" / "runner.json").read_text())
    return profile


def test_seccomp_profile_allows_by_name_and_refuses_what_changes_the_kernel() -> None:
    profile = seccomp_profile()
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    [rule] = profile["syscalls"]
    allowed = set(rule["names"])
    assert len(allowed) == len(rule["names"])
    needed = (
        "clone clone3 unshare setns mount umount2 pivot_root sethostname seccomp landlock_restrict_self pidfd_open execveat"
    )
    assert set(needed.split()) <= allowed
    never = (
        "bpf kexec_load init_module finit_module delete_module io_uring_setup keyctl add_key perf_event_open userfaultfd reboot"
    )
    never += (
        " swapon open_by_handle_at ptrace process_vm_readv process_vm_writev clock_settime syslog quotactl iopl ioperm acct"
    )
    assert not set(never.split()) & allowed


def test_seccomp_profile_allows_all_that_programs_may_call() -> None:
    """A program's own filter is the stricter one; what it allows must get that far."""
    assert set(seccomp.ALLOWED) <= set(seccomp_profile()["syscalls"][0]["names"])


def test_the_compose_file_has_the_same_capabilities_and_profile() -> None:
    runner = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["runner"]
    assert (runner["cap_drop"], runner["cap_add"]) == (["ALL"], CAPABILITIES["add"])
    [profile] = [option.removeprefix("seccomp:") for option in runner["security_opt"] if option.startswith("seccomp:")]
    assert (ROOT / "deploy" / profile).resolve() == CHART / "files" / "seccomp" / "runner.json"


def test_apparmor_profile_has_the_name_of_the_pods_and_parses() -> None:
    file = CHART / "files" / "apparmor" / "exec-service-runner"
    assert re.findall(r"^profile (\S+)", file.read_text(), re.M) == [USERNS["appArmorProfile"]["localhostProfile"]]  # type: ignore[index]
    if shutil.which("apparmor_parser"):
        command = ["apparmor_parser", "--skip-kernel-load", "--skip-cache", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
