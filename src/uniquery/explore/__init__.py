"""The local web page of `uniquery explore`: a gallery, the response of queries, and trained models to try."""
