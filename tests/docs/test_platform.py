"""The snippets of docs/platform.md, as far as they can be checked without a cluster."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from trl_hotfix import settings
from trl_hotfix.catalogue import loading
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.matching.installation import oldest_release

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "platform.md").read_text(encoding="utf-8")
VARIABLES = set(re.findall(r"^- `(TRL_HOTFIX\w*)`", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE))


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_job_of_kubernetes_hands_on_variables_as_text_and_mounts_the_policy() -> None:
    job = next(content for content in map(yaml.safe_load, snippets("yaml")) if content.get("kind") == "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert all(isinstance(value, str) for value in variables.values())
    assert settings.switch(variables["TRL_HOTFIX"]) == "on"
    (mount,) = container["volumeMounts"]
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
    assert variables["TRL_HOTFIX_ONLY"] == f"@{mount['mountPath']}/policy.json"
    assert f"configmap {pod['volumes'][0]['configMap']['name']} --from-file=policy.json" in PAGE


def test_the_runtime_environment_of_ray_is_what_ray_takes() -> None:
    environment = next(content for content in map(yaml.safe_load, snippets("yaml")) if "env_vars" in content)
    assert environment.keys() == {"env_vars"}
    assert all(isinstance(value, str) for value in environment["env_vars"].values())


def test_the_batch_script_is_one_that_the_shell_can_read() -> None:
    (script,) = snippets("sbatch")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert re.findall(r"^export (TRL_HOTFIX\w*)=", script, re.MULTILINE)


def test_the_image_installs_where_the_hook_works_and_checks_the_policy() -> None:
    (image,) = snippets("dockerfile")
    lines = [line for line in image.splitlines() if not line.startswith("#")]
    assert {line.split(" ", 1)[0] for line in lines} == {"COPY", "RUN", "ENV"}
    assert "--target" not in image
    assert lines[-1] == "RUN python -m trl_hotfix doctor"  # tests/process/test_image.py runs them
    assert lines[-2].startswith("ENV TRL_HOTFIX=observe TRL_HOTFIX_ONLY=@/etc/trl_hotfix/policy.json")


def test_each_variable_is_one_that_there_is() -> None:
    assert set(re.findall(r"\bTRL_HOTFIX\w*", PAGE)) <= VARIABLES


def test_the_line_for_collectors_has_the_fields_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    (line,) = snippets("json")
    shown = json.loads(line)
    real = json.loads(settings.json_line("INFO", "text", {"event": "hit", "patch": "some-id", "state": "disabled"}))
    assert list(shown) == list(real)
    assert [type(value) for value in shown.values()] == [type(value) for value in real.values()]


@pytest.mark.parametrize("which", [0, -1])
def test_the_supported_releases_are_those_on_record(which: int) -> None:
    releases = list(bodies().releases)
    assert str(oldest_release(loading.load())) == releases[0]
    said = re.search(r"all from (\S+) to (\S+);", PAGE)
    assert said is not None
    assert said.groups()[which] == releases[which]
