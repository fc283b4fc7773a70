# What .github/workflows runs, beside `make check`, `make test` and `make docs`: the same commands here and there.
#
#   make release-check RELEASE_TAG=v0.2.0                       does everything that names the version name this one?
#   make dist sbom chart release-notes                  what a release consists of, into dist/ and build/
#   make image push-image sign-image IMAGE_NAME=trainer IMAGES=registry.example/tidemill
#
# Signing is without keys: cosign asks the workflow's own identity, and writes it into the public log.

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
RELEASE_TAG ?= v$(VERSION)
# Prefix of image names, with the registry; one image; `cpu` for machines without GPUs.
IMAGES ?= tidemill
IMAGE_NAME ?= trainer
IMAGE_VARIANT ?=
IMAGE_TAG ?= $(VERSION)$(addprefix -,$(IMAGE_VARIANT))
IMAGE = $(IMAGES)/$(IMAGE_NAME):$(IMAGE_TAG)
FOLDER = services/$(if $(filter reward-model,$(IMAGE_NAME)),reward/model_server,$(IMAGE_NAME))
# What images without GPUs stand on; `reward` and `console` load no model and stand on Python alone.
CPU_BASE = $(if $(filter cpu,$(IMAGE_VARIANT)),$(filter trainer rollout reward-model,$(IMAGE_NAME)))
DIGEST = build/images/$(IMAGE_NAME)-$(IMAGE_TAG)
OUT := build/release
TOOLS := build/release-tools
CYCLONEDX := cyclonedx-bom==7.5.0

.PHONY: dist sbom chart release-check release-notes release-page image images-cpu push-image sign-image registry-login

dist: $(BASE) ## build the wheel and the sdist into dist/
	$(BIN)/python -m infra.release dist dist

$(TOOLS)/.$(CYCLONEDX).stamp: | $(BASE)
	$(BIN)/python -m venv $(TOOLS) && $(TOOLS)/bin/python -m pip install --disable-pip-version-check -qq "$(CYCLONEDX)"
	@touch $@

sbom: $(TOOLS)/.$(CYCLONEDX).stamp ## list what the lock files install, as CycloneDX, into build/release/
	mkdir -p $(OUT)
	$(TOOLS)/bin/cyclonedx-py requirements requirements/base.lock --pyproject pyproject.toml --output-reproducible \
		-o $(OUT)/tidemill-$(VERSION).cdx.json

chart: $(BASE) ## pack the Helm chart into build/release/
	$(BIN)/python -m infra.release chart $(OUT)

release-check: $(BASE) ## does everything that names the version name that of RELEASE_TAG?
	$(BIN)/python -m infra.release check $(RELEASE_TAG)

release-notes: $(BASE) ## the part of CHANGELOG.md that is about RELEASE_TAG, in build/release/notes.md
	mkdir -p $(OUT)
	$(BIN)/python -m infra.release notes $(RELEASE_TAG) > $(OUT)/notes.md

release-page: ## the release of RELEASE_TAG on GitHub, with all that was built (needs gh and its token)
	gh release create $(RELEASE_TAG) --verify-tag --title $(RELEASE_TAG) --notes-file $(OUT)/notes.md dist/* $(OUT)/*.json $(OUT)/*.tgz

image: ## build one image: IMAGE_NAME=trainer|rollout|reward|reward-model|console, IMAGE_VARIANT=cpu or nothing, IMAGES=prefix
	$(if $(CPU_BASE),docker build -t tidemill-cpu:$(IMAGE_TAG) -f infra/images/cpu.Dockerfile $(IMAGE_ARGS) .)
	docker build -t $(IMAGE) -f $(FOLDER)/Dockerfile $(if $(CPU_BASE),--build-arg BASE_IMAGE=tidemill-cpu:$(IMAGE_TAG)) \
		$(IMAGE_ARGS) .

images-cpu: ## build the CPU images with Docker (IMAGE_ARGS="--build-arg PIP_FIND_LINKS=...")
	for name in trainer rollout reward-model reward console; do $(MAKE) image IMAGE_NAME=$$name IMAGE_VARIANT=cpu || exit; done

registry-login: ## log in to REGISTRY as REGISTRY_USER with the password in REGISTRY_TOKEN
	@printenv REGISTRY_TOKEN | docker login "$$REGISTRY" --username "$$REGISTRY_USER" --password-stdin

push-image: ## push the image of IMAGE_NAME, and note its digest
	mkdir -p $(dir $(DIGEST))
	docker push $(IMAGE)
	docker inspect --format '{{index .RepoDigests 0}}' $(IMAGE) > $(DIGEST).digest

sign-image: ## sign what was pushed, and attest its list of packages (needs cosign and syft)
	cosign sign --yes "$$(cat $(DIGEST).digest)"
	syft scan "$$(cat $(DIGEST).digest)" -o cyclonedx-json=$(DIGEST).cdx.json
	cosign attest --yes --type cyclonedx --predicate $(DIGEST).cdx.json "$$(cat $(DIGEST).digest)"
