"""A simulated server that tells its secret and speaks to terminals: in its log, on /server_info, in its answers.

The secret is in $LEAKY_TOKEN. `--leaky-fails` answers every generation with a 500 that says it all.
"""

import os
import sys

from harness.engines import simulated_server as server

SECRET = os.environ["LEAKY_TOKEN"]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e|<script>alert(1)</script>[bold]`x`"
FAILS = "--leaky-fails" in sys.argv
_info, _generate = server.Simulation._server_info, server.Simulation._generate


def tell(simulation, connection, message):
    inner = connection.reply

    def more(status, body, *rest):
        body = {**body, "token_of_mine": SECRET, "api_key": "sk-never-seen", "said": [f"login as {SECRET}", HOSTILE]}
        inner(status, body, *rest)

    connection.reply = more
    _info(simulation, connection, message)
    del connection.reply


def generate(simulation, connection, message):
    if FAILS:
        connection.reply(500, f"{SECRET} {HOSTILE}", "text/plain")
    else:
        _generate(simulation, connection, message)


if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if word != "--leaky-fails"]
    server.Simulation._server_info, server.Simulation._generate = tell, generate
    sys.stdout.write(f"logged in with {SECRET} {HOSTILE}\n")
    sys.stdout.flush()
    sys.exit(server.main())
