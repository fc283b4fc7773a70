#!/bin/bash
set -e
sqlite3 users.db < users.sql
sqlite3 users.db 'DELETE FROM users WHERE id NOT IN (SELECT min(id) FROM users GROUP BY address);
CREATE UNIQUE INDEX by_address ON users (address)'
