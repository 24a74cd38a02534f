"""Whether an S3 store is there, takes the keys, and has an empty bucket of that name; or empties that bucket.

    python s3_bucket.py URL REGION BUCKET check|empty

Runs in the environment that has boto3, with the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Exit code 1: it is
not so; the last line says what, and the cure.
"""

import sys
from typing import Any


def main() -> str | None:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    url, region, bucket, what = sys.argv[1:5]
    once: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 10}
    config = Config(s3={"addressing_style": "path"}, **once)
    client = boto3.client("s3", endpoint_url=url, region_name=region, config=config)
    try:
        if what == "empty":
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                for each in page.get("Contents", ()):
                    client.delete_object(Bucket=bucket, Key=each["Key"])
        found = client.list_objects_v2(Bucket=bucket, MaxKeys=1)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in ("NoSuchBucket", "404"):
            return f"it has no bucket {bucket}; make it, or correct cache.remote.bucket"
        return f"it refuses the credentials ({code}); correct what cache.remote.credentials name"
    except BotoCoreError as error:
        return f"no S3 store answers ({error}); start it, or correct cache.remote.endpoint"
    if found.get("KeyCount"):
        return f"bucket {bucket} holds objects already, and a run empties its store; name an empty one, or empty it"
    return None


if __name__ == "__main__":
    complaint = main()
    if complaint is not None:
        print(complaint)
        sys.exit(1)
