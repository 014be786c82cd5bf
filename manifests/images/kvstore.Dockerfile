# The image of the KV store's node server. Build from the repository root: docker build -f manifests/images/kvstore.Dockerfile -t paceline-kvstore:0.1.0 .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY operator operator
COPY engine engine
COPY kvstore kvstore
COPY crds crds
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir --constraint constraints.txt ".[kvserver,s3,encryption,compression]"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["paceline-kvstore"]
