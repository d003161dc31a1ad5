"""What this build is, and which protocol it speaks: workers and frontends with the same major understand each other."""

VERSION = "0.1.0"
PROTOCOL_MAJOR = 1
