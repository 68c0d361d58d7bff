# vLLM with kvtier's connector. From the root of the checkout:
#     docker build -f deploy/docker/engine.Dockerfile -t kvtier-vllm:0.1.0 .
# Linted, never built by us: neither Docker nor a GPU was at hand (docs/vllm.md says what was run).
FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml README.md LICENSE /src/kvtier/
COPY kvtier /src/kvtier/kvtier
COPY kernels /src/kvtier/kernels
# Its dependencies are lower bounds that vLLM's own versions satisfy: nothing of vLLM's is replaced.
RUN python3 -m pip install --no-cache-dir /src/kvtier && rm -r /src/kvtier
ENV KVTIER_SOCKET=/run/kvtier/kvtier.sock
