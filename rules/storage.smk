# Needs: the fresh caches of a run to store them; to fetch them, what was stored of it.
# Makes: store_{run} puts an archive for each part of a run on S3, and a record that names them;
#        fetch_{run} brings those that are missing here, so that the next build encodes nothing.

from latentmake.exchange.archives import archived, record

STORED = SESSION.config.storage.caches.rstrip("/")


rule archive:
    input:
        order=ancient(".latentmake/archives/{dataset}/{model}/{part}.{digest}.json"),
    output:
        archive=storage.s3(f"{STORED}/{{dataset}}/{{model}}/{{part}}.{{digest}}.tar"),
    log:
        "logs/archive/{dataset}/{model}/{part}.{digest}.log",
    wildcard_constraints:
        part=r"[^/]+",
        digest=r"[0-9a-f]{20}",
    localrule: True
    conda:
        "../envs/encode.yaml"
    script:
        "../scripts/archive.py"


for run in SESSION.runs:
    storing = SESSION.run_order(run, "store")
    fetching = SESSION.run_order(run, "fetch")

    rule:
        name:
            f"record_{run}"
        input:
            order=ancient(storing or workflow.main_snakefile),
            archives=[
                ancient(storage.s3(each, retrieve=False)) for each in archived(storing)
            ],
        output:
            record=[storage.s3(each) for each in record(storing)],
        log:
            f"logs/record/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/record.py"

    rule:
        name:
            f"store_{run}"
        input:
            [storage.s3(each, retrieve=False) for each in record(storing)],

    rule:
        name:
            f"fetch_{run}"
        input:
            order=ancient(fetching or workflow.main_snakefile),
            archives=[storage.s3(each) for each in archived(fetching)],
        log:
            f"logs/fetch/{run}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/fetch.py"
