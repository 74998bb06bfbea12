# reinforce-ada in a container: `docker build -t reinforce-ada .`, then
#   docker run --rm -v "$PWD:/work" reinforce-ada train --config=tiny --workdir=runs/tiny
# For an accelerator: `--build-arg ACCELERATOR=tpu` or `--build-arg ACCELERATOR=cuda` (then `docker run --gpus=all`).
# The image for TPUs has what buckets need. Where devices belong to root, add `--build-arg RUN_AS=0:0`.
FROM python:3.12-slim

ARG ACCELERATOR=cpu
WORKDIR /opt/reinforce_ada_jax
COPY pyproject.toml requirements.txt requirements-gcs.txt README.md LICENSE ./
COPY reinforce_ada_jax reinforce_ada_jax
COPY configs configs
COPY examples examples

# The versions are those of requirements.txt; it also has the server's google-jetstream, installed without dependencies.
RUN case "$ACCELERATOR" in \
      cpu) extras=serve,hub ;; \
      tpu) extras=serve,hub,gcs,tpu ;; \
      cuda) extras=serve,hub,cuda ;; \
      *) echo "ACCELERATOR is cpu, tpu or cuda, not '$ACCELERATOR'." >&2; exit 2 ;; \
    esac \
    && grep '^google-jetstream==' requirements.txt > /tmp/jetstream.txt \
    && grep -hv '^google-jetstream==' requirements.txt requirements-gcs.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt ".[$extras]" \
    && pip install --no-cache-dir --no-deps -r /tmp/jetstream.txt \
    && rm /tmp/jetstream.txt /tmp/constraints.txt

# Runs are written to a mounted folder: `docker run --user "$(id -u):$(id -g)"` writes them as you.
RUN mkdir /work && chown 1000:1000 /work
ARG RUN_AS=1000:1000
USER $RUN_AS
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["reinforce-ada"]
CMD ["--help"]
