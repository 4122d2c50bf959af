# A CPU image: docker build -t uniquery .
FROM python:3.12-slim

WORKDIR /opt/uniquery
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY src src
RUN pip install --no-cache-dir -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir -c constraints.txt ".[pretrained,hub]"

RUN useradd --create-home --uid 1000 uniquery
USER uniquery
WORKDIR /work
ENTRYPOINT ["uniquery"]
CMD ["--help"]
