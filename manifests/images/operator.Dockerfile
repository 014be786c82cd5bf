# The operator image. Build from the repository root: docker build -f manifests/images/operator.Dockerfile -t paceline-operator:0.1.0 .
# It has neither torch nor the engine's other dependencies.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY operator operator
COPY engine engine
COPY kvstore kvstore
COPY crds crds
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir --constraint constraints.txt ".[operator]"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["paceline-operator"]
