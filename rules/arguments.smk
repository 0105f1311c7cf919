# Needs: the command line.
# Makes: ASKED, what the user asked for.

from contextlib import redirect_stderr
from io import StringIO

from latentmake.config.document import check_files
from latentmake.plan.request import as_words
from snakemake.cli import parse_args


def read_arguments():
    """Return what Snakemake was called with, profiles included; it says so itself already.

    A page that is asked for by its file stands there by its word, such as `report_{run}`.
    """
    called = Path(sys.argv[0]).stem in ("snakemake", "__main__")
    with redirect_stderr(StringIO()):
        found = parse_args(sys.argv[1:] if called else [])[1]
    found.targets = as_words(found.targets or [])
    return found


ASKED = read_arguments()
check_files(workflow.overwrite_configfiles or ["config/config.yaml"])

# A file of the user's own replaces the sample's, it does not add to it.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"
