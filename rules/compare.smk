# Needs: the sample pictures of runs that were trained, and folders of images.
# Makes: reports/compare_{names}.html, for each comparison that was asked for; it trains nothing.

for page in SESSION.pages:

    rule:
        name:
            f"compare_{page.name}"
        input:
            order=page.order if page.stale else ancient(page.order),
            trained=page.trained,
        output:
            page=page.path,
        log:
            f"logs/compare/{page.name}.log",
        localrule: True
        conda:
            "../envs/encode.yaml"
        script:
            "../scripts/compare.py"
