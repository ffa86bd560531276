"""The campaign: kills, damaged files, odd images, foreign files and wrong arguments, drawn by a seed.

`make test-slow` runs a part. `PROXYMETRIC_TEST_SHARE=1 pytest tests/campaign` runs all of it, in about half an hour.
"""
