"""gcloud as far as the launch scripts call it.

It writes every call to calls.jsonl and keeps a small world in world.json: one node, one queued resource, and a home
folder for each host, in which `ssh --command` is really run by bash. $WORLD names the folder. Keys of the world:

  node, queue        state, or a list of states that successive looks see (the last one stays)
  hosts, slices      how many: hosts of each slice; the nodes of several slices have names of their own
  becomes            state or states of a node after its creation; `queue_becomes` likewise
  preempt_before     numbers of calls (from 1) before which a READY node is preempted
  edit_before        [number, file]: before that call the file is overwritten with "edited"
  fail               {"call": number} or {"words": [words of the call]}, with "code" and "message"; "times" limits it
"""

# Started thousands of times in the tests: what takes long to import is imported where it is used.
import json
import os
import sys

WORLD = os.environ["WORLD"]


def load() -> dict:
    with open(f"{WORLD}/world.json") as file:
        return json.load(file)


def save(world: dict) -> None:
    with open(f"{WORLD}/world.json", "w") as file:
        json.dump(world, file)


def record(call: list[str]) -> int:
    """Writes a call down; its number, from 1."""
    with open(f"{WORLD}/calls.jsonl", "a+") as lines:
        lines.write(json.dumps(call) + "\n")
        lines.seek(0)
        return len(lines.readlines())


def look(world: dict, key: str) -> str:
    """The state that this look sees."""
    states = world[key] if isinstance(world[key], list) else [world[key]]
    world[key] = states[1:] if len(states) > 2 else states[-1]
    save(world)
    return states[0]


def option(arguments: list[str], name: str, default: str = "") -> str:
    return next((word.split("=", 1)[1] for word in arguments if word.startswith(f"--{name}=")), default)


def die(message: str, code: int = 1) -> None:
    print(f"ERROR: {message}", file=sys.stderr)
    sys.exit(code)


def told_to_fail(world: dict, number: int, call: list[str]) -> None:
    fail = world["fail"]
    if not fail or not (number == fail.get("call") or set(fail.get("words", ["-"])) <= set(" ".join(call).split())):
        return
    if fail.get("times") is not None:
        fail["times"] -= 1
        world["fail"] = fail if fail["times"] else None
        save(world)
    die(fail.get("message", "told to fail"), fail.get("code", 1))


def make_node(world: dict) -> None:
    """A node whose hosts know nothing of those before."""
    import shutil  # noqa: PLC0415

    for host in range(world["slices"] * world["hosts"]):
        shutil.rmtree(f"{WORLD}/host{host}", ignore_errors=True)
        os.mkdir(f"{WORLD}/host{host}")
    world["node"] = world["becomes"]
    save(world)


def queued_resource(world: dict, verb: str, arguments: list[str]) -> None:
    if verb == "create":
        count = option(arguments, "node-count", "1")
        save(world | {"queue": world["queue_becomes"], "slices": int(count)})
    elif verb == "delete":
        save(world | {"queue": "ABSENT", "node": "ABSENT"})
    else:
        state = look(world, "queue")
        if state == "ABSENT":
            die("(gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found")
        if state == "ACTIVE" and world["node"] == "ABSENT":
            make_node(world)
        print(state)


def hosts(world: dict, arguments: list[str]) -> list[str]:
    """The home folders of hosts: without --node those of the first slice."""

    def chosen(name: str, count: int) -> list[int]:
        number = option(arguments, name, "0")
        return list(range(count)) if number == "all" else [int(number)]

    slices, workers = chosen("node", world["slices"]), chosen("worker", world["hosts"])
    return [f"{WORLD}/host{node * world['hosts'] + worker}" for node in slices for worker in workers]


def scp(world: dict, arguments: list[str]) -> None:
    import shutil  # noqa: PLC0415

    *files, target = [word for word in arguments if not word.startswith("--")]
    assert target.endswith(":"), target
    for home in hosts(world, arguments):
        for file in files:
            shutil.copy(file, home)


def ssh(world: dict, arguments: list[str]) -> None:
    import subprocess  # noqa: PLC0415

    codes = []
    for home in hosts(world, arguments):
        environment = os.environ | {"HOME": home, "PATH": f"{WORLD}/host_bin:/usr/bin:/bin"}
        command = ["bash", "-c", option(arguments, "command")]
        codes.append(subprocess.run(command, cwd=home, env=environment, check=False).returncode)
    sys.exit(next((code for code in codes if code), 0))


def main(call: list[str]) -> None:
    number, world = record(call), load()
    if number in world["preempt_before"] and world["node"] == "READY":
        world |= {"node": "PREEMPTED", "queue": "SUSPENDED" if world["queue"] == "ACTIVE" else world["queue"]}
        save(world)
    if world["edit_before"][:1] == [number]:
        with open(world["edit_before"][1], "w") as file:
            file.write("edited\n")
    told_to_fail(world, number, call)
    assert call[:2] == ["compute", "tpus"], call
    group, verb, rest = call[2], call[3], call[4:]
    is_queued, reaches_hosts = group == "queued-resources", verb in ("scp", "ssh")
    if is_queued and not reaches_hosts:
        queued_resource(world, verb, rest)
    elif not is_queued and world["slices"] > 1:
        die("NOT_FOUND: the nodes are ada-0 and ada-1")
    elif verb == "describe":
        state = look(world, "node")
        if state == "ABSENT":
            die("(gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource was not found")
        print(f"{state}\t{world['hosts']}")
    elif verb == "create":
        make_node(world)
    elif verb == "delete":
        save(world | {"node": "ABSENT"})
    elif world["node"] != "READY":
        die(f"the node is {world['node']}")
    else:
        {"scp": scp, "ssh": ssh}[verb](world, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
