-- Make the message of a dead letter pending again, and remove the dead letter, as one unit.
-- The message is still in its stream, with its id and bytes: it only needs a holder, and gets one that counts as
-- silent for longer than a lease, so that the next worker that reclaims takes it.
-- Atomic against a second `requeue` of it, and against a worker that begins before its progress is restored.
-- KEYS: dead, stream, progress.
-- ARGV: dead_id, group, entry_id, idle_ms, version, holder, published...
-- The group was started at `version`, or ''; the indices `published` are there already.
-- Returns 1 done, 0 the dead letter is gone, -1 the stream no longer has the message.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
if #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then
  return -1
end
redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[6], 0, ARGV[3],
  'IDLE', ARGV[4], 'RETRYCOUNT', 0, 'FORCE', 'JUSTID')
if ARGV[5] ~= '' then
  -- NX: what workers have noted is newer than what the caller knows.
  redis.call('HSETNX', KEYS[3], 'version', ARGV[5])
end
for i = 7, #ARGV do
  redis.call('HSETNX', KEYS[3], ARGV[i], '')
end
-- Last: if the server's file is cut before it, the dead letter is still there and can be put back again.
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
