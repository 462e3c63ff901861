# make demo    the product alone (no torch): fetch a model, compile it, decode, compare plain with speculative decoding
# make test    the product with its tests' packages, and pytest
# make check   ruff and mypy
#
# PYTHON is any Python from 3.10 to 3.13. PIP_ARGS goes to pip: the tests pin torch's release and take whichever build
# the index offers, so on Linux `make test PIP_ARGS="--extra-index-url URL"` with PyTorch's CPU index saves gigabytes.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

DEMO := .venv
TEST := .venv-test
CHECK := .venv-check

.PHONY: demo test check clean

demo: $(DEMO)/.installed
	$(DEMO)/bin/python -m tools.demo $(DEMO_ARGS)

test: $(TEST)/.installed
	$(TEST)/bin/python -m pytest $(PYTEST_ARGS)

# mypy does not follow an editable install's folder map, so it reads a copy under the names that code imports.
check: $(CHECK)/.installed
	$(CHECK)/bin/ruff check .
	rm -rf build/check && mkdir -p build/check
	cp -r builder build/check/specbuild
	cp -r runtime build/check/specrun
	cp -r plugins profiles build/check/specrun/
	cd build/check && ../../$(CHECK)/bin/mypy --config-file ../../pyproject.toml --strict -p specrun
	cd build/check && ../../$(CHECK)/bin/mypy --config-file ../../pyproject.toml -p specbuild

clean:
	rm -rf $(DEMO) $(TEST) $(CHECK) build demo.bundle .pytest_cache .mypy_cache .ruff_cache

$(DEMO)/.installed: EXTRA =
$(TEST)/.installed: EXTRA = [test]
$(CHECK)/.installed: EXTRA = [check]

%/.installed: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e ".$(EXTRA)"
	touch $@
