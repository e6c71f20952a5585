# Two commands: `make demo` sets everything up and runs the main job, `make test` passes the tests.
#
# torch comes first and by this exact pin, so that nothing pulls another build of it. On Linux PyPI's own wheel brings CUDA;
# for a CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo TORCH=torch==2.13.0+cpu
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
REPOSITORY := .venv-repository
# The wrapt that many have, and the oldest of everything that pyproject.toml allows and that has a wheel for this Python.
WRAPT := 1.17.3
# What depends on the version of wrapt, and of the other libraries. The stacks of the bench have versions of their own.
BY_LIBRARY := $(addprefix tests/unit/,catalogue commands matching recording reporting scanning selection verification \
  test_errors.py test_model.py)
BY_WRAPT := $(addprefix tests/unit/patching/test_,$(addsuffix .py,api application conflicts engine breaker module_patch pickled \
  self_test sites wrappers)) tests/unit/import_hooks tests/unit/test_autostart.py tests/process/test_moe_dpo_under_deepspeed.py
# Not the proofs: their trainers are of classes that each release has.
CHECKED := bench tools gpu benchmarks tests
LOOSELY := --ignore-missing-imports --implicit-reexport --allow-subclassing-any --no-warn-return-any \
  --no-warn-unused-ignores $(addprefix --disable-error-code=,attr-defined comparison-overlap func-returns-value \
  has-type method-assign misc union-attr var-annotated)

# Each line's time, by target, for the table at the end of `make test` and of .ci/run.
SHELL := .ci/timed
.SHELLFLAGS = target=$@ -c
$(shell rm -f build/times.txt)

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Without compiled files every process that imports TRL takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test gpu gpu-bundle lint types libraries bench patches mutants benchmarks curves evidence release relations matrix upstream picture recording docs osv schemas lint-repository lint-yaml \
  lint-distribution unit clean

demo: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python -m launched.demo

test: $(DOCS)/ready lint types lint-repository
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	@echo "seconds by target:"; cat build/times.txt 2> /dev/null || true

# On a machine with a GPU: the tests that need one, six side by side, into evidence/gpu.json. `make gpu TESTS="seeds costs"` runs
# these groups; `make gpu TESTS=--rehearse JOBS=1` runs on the CPU, with tiny sizes, and records nothing.
gpu: $(VENV)/ready
	$(BIN)/python -m gpu.gpu --jobs $(or $(JOBS),6) $(TESTS)

# All of that in one archive, for a machine that has its own torch and no network: docs/ranks-and-gpu.md.
gpu-bundle: $(VENV)/ready
	$(BIN)/python -m gpu.bundle $(if $(PYTHON_VERSION),--python $(PYTHON_VERSION)) $(if $(CUDA),--cuda $(CUDA)) build/gpu/trl-hotfix-gpu.tar.xz

# The tests that need no release of the bench, in another environment too: `make unit BIN=/other/venv/bin`. Where there is no
# torch, those that need it are skipped, and say so: a Python with `pip install -e .[test]` and `--no-deps trl==0.11.4` is enough.
unit:
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/unit

# What depends on the libraries again, with the oldest that are allowed.
libraries: $(VENV)/oldest $(VENV)/wrapt
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(BIN)/python -m pytest -q -n 2 --dist worksteal $(BY_WRAPT) $(BY_LIBRARY)
	PYTHONPATH=$(CURDIR)/$(VENV)/wrapt $(BIN)/python -m pytest -q -n 2 --dist worksteal $(BY_WRAPT)

bench: $(VENV)/ready
	$(BIN)/python -m bench build $(if $(RELEASES),--releases $(RELEASES))

# The self-tests and proofs whose evidence is not on record, or no longer of the present code:
# `make evidence`, or `make evidence PATCHES=some-id`. The page with all numbers is build/evidence/matrix.html.
evidence: $(VENV)/ready
	$(BIN)/python -m bench run $(if $(PATCHES),--patches $(PATCHES))
	$(BIN)/python -m bench.pages.picture

# The tests of patches, on the first and the newest release that has the bug: `make patches`, or `make patches PATCHES="some-id"`.
patches: $(VENV)/ready
	FIRST_AND_NEWEST=1 $(BIN)/python -m pytest tests/bench/test_patch_tests.py $(if $(PATCHES),-k "$(subst $() $(), or ,$(PATCHES))")

# The wrappers broken in every way, and what self-test and proof do not notice: `make mutants PATCHES="some-id another"`.
mutants: $(VENV)/ready
	$(BIN)/python -m bench.mutants $(PATCHES)

# A new release of TRL, from its wheel to the files of a pull request (docs/new-release.md): `make release RELEASE=1.17.0`.
release: $(VENV)/ready
	$(BIN)/python -m bench.releases.new_release $(RELEASE)

# Everything again: every patch on every release and stack, proofs, variants, orders, pickles, TRL's own tests. `make matrix`,
# or a part of it, `make matrix SHARD=3/20`. A part leaves its evidence in build/evidence-3-20, which `python -m bench merge` records.
matrix: $(VENV)/ready
	$(BIN)/python -m bench run --again $(if $(SHARD),--shard $(SHARD) --into build/evidence-$(subst /,-,$(SHARD)))
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m matrix --shard $(or $(SHARD),1/1)
	$(BIN)/python -m bench.relations --on --recorded $(if $(SHARD),--shard $(SHARD))

# Two runs that must agree, on TRL's trainers of each release, without the patches and with them; what is known is not run again:
# `make relations RELEASES=1.16.0`, or a part, `make relations SHARD=3/20`. The answers are in build/relations.json.
relations: $(VENV)/ready
	$(BIN)/python -m bench.relations $(if $(RELEASES),--releases $(RELEASES)) $(if $(SHARD),--shard $(SHARD))

# Longer runs without each patch and with it, for the pictures of the losses.
curves: $(VENV)/ready
	$(BIN)/python -m bench curves $(if $(PATCHES),--patches $(PATCHES))

# What it costs, and what it gains: benchmarks/README.md. On a machine that does nothing else:
# `make benchmarks`, or `make benchmarks NAMES="start list"`; `make benchmarks QUICK=1` to see that it works.
benchmarks: $(VENV)/ready
	$(BIN)/python -m benchmarks.run $(if $(QUICK),--quick) $(NAMES)

# TRL's own tests without the patches and with all of them; CHECKOUT=a clone of TRL for the releases whose archive has none:
# `make upstream`, or `make upstream RELEASES=1.7.1 CHECKOUT=../trl`.
upstream: $(VENV)/ready
	$(BIN)/python -m bench.upstream.runner $(if $(RELEASES),--releases $(RELEASES)) $(if $(CHECKOUT),--checkout $(CHECKOUT))

# docs/matrix.svg, the picture in the README: for each release of trl_hotfix, and not for each patch.
picture: $(VENV)/ready
	$(BIN)/python -m bench.pages.summary

# docs/recording.svg, of the commands that a user runs: for each release of trl_hotfix.
recording: $(VENV)/ready
	$(BIN)/python -m tools.recording

# The documentation site, into `site/`. Torch and TRL are not needed for it.
docs: $(DOCS)/ready
	$(DOCS)/bin/mkdocs build --strict

# The catalogue as OSV records, for other scanners, into build/osv/.
osv: $(VENV)/ready
	$(BIN)/python -m tools.osv

# docs/schemas/ again, from what the commands say that they print.
schemas: $(VENV)/ready
	$(BIN)/python -m tools.pages.generate

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m trl_hotfix.catalogue.shipped  # patches.yaml and known.yaml, against the modules of the patches

# What is published of this repository: workflows, forms, words, metadata. It needs neither torch nor TRL.
# CI on the forge runs actionlint too, whose package fetches the program from GitHub.
lint-repository: $(REPOSITORY)/ready lint-yaml
	$(REPOSITORY)/bin/zizmor --offline --persona=pedantic --no-progress .
	$(REPOSITORY)/bin/codespell
	$(REPOSITORY)/bin/python -m tools.prose
	$(REPOSITORY)/bin/validate-pyproject pyproject.toml

# The files of a release, as an index and its users take them.
lint-distribution: $(REPOSITORY)/ready
	rm -rf build/dist
	$(REPOSITORY)/bin/python -m build --outdir build/dist . > /dev/null
	$(REPOSITORY)/bin/twine check --strict build/dist/*
	$(REPOSITORY)/bin/check-wheel-contents build/dist/*.whl
	$(REPOSITORY)/bin/pyroma --min 8 build/dist/*.tar.gz  # of 10: no address of a person is published

lint-yaml: $(REPOSITORY)/ready
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(REPOSITORY)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

types: $(VENV)/ready
	$(BIN)/mypy
	$(BIN)/mypy $(LOOSELY) $(CHECKED)

# TRL 0.11.4, DeepSpeed and the versions of everything else that they were seen to work with.
$(VENV)/ready: pyproject.toml bench/releases/stacks/tf4.44.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -r bench/releases/stacks/tf4.44.txt ninja
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -c bench/releases/stacks/tf4.44.txt deepspeed==0.19.8
	$(BIN)/pip install --quiet --no-deps trl==0.11.4
	$(BIN)/pip install --quiet -c bench/releases/stacks/tf4.44.txt -e '.[dev]'
	touch $@

$(VENV)/wrapt: $(VENV)/ready
	$(BIN)/pip install --quiet --no-deps --target $@ --upgrade wrapt==$(WRAPT)
	touch $@

$(VENV)/oldest: $(VENV)/ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --resolution lowest-direct --only-binary :all: --target $@
	touch $@

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet -e '.[docs]'
	touch $@

$(REPOSITORY)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(REPOSITORY)
	$(REPOSITORY)/bin/pip install --quiet -e '.[repository]'
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(REPOSITORY) .bench dist build site
