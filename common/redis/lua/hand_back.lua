-- Give held entries back at once: the next reclaim takes them, and this delivery does not count.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, entry ids.
for i = 4, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i],
      'IDLE', ARGV[3], 'RETRYCOUNT', math.max(held[1][4] - 1, 0), 'JUSTID')
  end
end
return 1
